"""Sessions that nobody uses are closed, and rows of closed ones are deleted; what is in use is neither."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.server.housekeeping import forget_closed_sessions
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import SQLiteStore, read_sessions
from tests.builders import user
from tests.session_servers.served import SetClock, eventually, says, serving, session_on
from tests.session_servers.store_file import read_file

HOUR = 3600.0
SETTINGS = ServerSettings(idle_ttl_s=HOUR)


def column(path: Path, sql: str) -> list[Any]:
    """The first column of what a query gives."""
    with closing(sqlite3.connect(path)) as connection:
        return [row[0] for row in connection.execute(sql)]


async def test_a_session_that_nobody_uses_is_closed_and_one_in_use_is_not(tmp_path: Path) -> None:
    """In use: with a turn in flight, with a call at the gate, or asked for; the store says why the other closed."""
    clock, hanging = SetClock(), ScriptStep(text="slow", fault=ScriptedFault.HANG)
    async with serving(hanging, store=tmp_path / "s.db", settings=SETTINGS, clock=clock) as client:
        idle, in_flight, held, read = [await client.create() for _ in range(4)]
        calls = [asyncio.create_task(client.chat(in_flight, [user("a")]))]
        await client.turns_in_flight(1)
        await client.http.post("/sessions/pause")
        calls.append(asyncio.create_task(client.chat(held, [user("b")])))
        await client.held(1)
        clock.now += HOUR / 2
        await client.record(read)
        clock.now += HOUR / 2

        assert await client.server.sessions.expire() == 1
        left = {session["session_id"] for session in (await client.http.get("/sessions")).json()["sessions"]}
        refused = await client.chat(idle, [user("c")])
        metrics = (await client.http.get("/metrics")).text
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    assert left == {session.session_id for session in (in_flight, held, read)}
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "session_not_found")
    assert "not used for 3600 s" in refused.json()["error"]["message"]
    assert "harness_sessions_expired_total 1.0" in metrics
    reasons = f"SELECT closed_because FROM sessions WHERE session_id = '{idle.session_id}'"
    assert column(tmp_path / "s.db", reasons) == ["idle"]


async def test_a_server_looks_by_itself(tmp_path: Path) -> None:
    """Many sessions whose time is over go at once, and are not restored."""
    clock = SetClock()
    async with serving(store=tmp_path / "s.db", settings=SETTINGS, clock=clock) as client:
        for _ in range(10):  # no more at once than a busy machine answers before a client gives up
            await asyncio.gather(*(client.create() for _ in range(10)))
        clock.now += HOUR
        await eventually(lambda: len(client.server.sessions) == 0)
    async with serving(store=tmp_path / "s.db", settings=SETTINGS, clock=clock) as client:
        assert client.restored == 0


async def test_after_a_restart_the_time_begins_anew(tmp_path: Path) -> None:
    """An owner whose server was down for a day finds what it left."""
    clock = SetClock()
    async with serving(store=tmp_path / "s.db", settings=SETTINGS, clock=clock) as client:
        await client.create()
    clock.now += 24 * HOUR
    async with serving(store=tmp_path / "s.db", settings=SETTINGS, clock=clock) as client:
        assert (await client.server.sessions.expire(), len(client.server.sessions)) == (0, 1)
        clock.now += HOUR
        assert (await client.server.sessions.expire(), len(client.server.sessions)) == (1, 0)


async def test_an_embedded_server_keeps_its_sessions(tmp_path: Path) -> None:
    """Whoever embeds one gives them back."""
    clock = SetClock()
    async with serving(clock=clock) as client:
        await client.create()
        clock.now += 1e9
        assert (await client.server.sessions.expire(), len(client.server.sessions)) == (0, 1)


async def test_rows_of_sessions_that_were_closed_long_ago_are_deleted(tmp_path: Path) -> None:
    """A few at a time; those closed later stay, and so do all that are open, however old."""
    clock, path = SetClock(), tmp_path / "s.db"
    async with serving(*says("one"), store=path, clock=clock) as client:
        sessions = [await client.create() for _ in range(6)]
        for session in sessions:
            await client.say(session, [user("hello")])
        for session in sessions[:4]:
            await client.http.delete(f"/sessions/{session.session_id}")
        clock.now += HOUR
        await client.http.delete(f"/sessions/{sessions[4].session_id}")
        store = client.server._turns.store
        first = await store.forget_closed(HOUR / 2, 3)
        counts = (first, await store.forget_closed(HOUR / 2, 3), await store.forget_closed(HOUR / 2, 3))

    assert counts == (3, 1, 0)
    assert {session: len(kept.turns) for session, kept in read_file(path).items()} == {
        session.session_id: 1 for session in sessions[4:]
    }


class CountingStore(SQLiteStore):
    """Says how often somebody has looked for old rows."""

    looks = 0

    async def forget_closed(self, older_than_s: float, limit: int) -> int:
        """See `SessionStore`."""
        self.looks += 1
        return await super().forget_closed(older_than_s, limit)


async def test_the_keeper_of_closed_sessions_goes_on_when_the_disk_does_not(tmp_path: Path) -> None:
    """A look that fails is a line in the log; the next one deletes."""
    clock, path = SetClock(), tmp_path / "s.db"
    async with session_on(store=path, clock=clock) as (client, session):
        await client.http.delete(f"/sessions/{session.session_id}")
    clock.now += HOUR
    async with CountingStore(path, clock=clock) as store:
        with closing(sqlite3.connect(path)) as other:
            other.execute("ALTER TABLE sessions RENAME TO elsewhere")
            keeper = asyncio.create_task(forget_closed_sessions(store, HOUR / 2, every_s=0.01))
            await eventually(lambda: store.looks > 2)
            other.execute("ALTER TABLE elsewhere RENAME TO sessions")
        await eventually(lambda: not read_sessions(path))
        keeper.cancel()


@pytest.mark.parametrize(
    ("sql", "index"),
    [
        ("SELECT * FROM sessions WHERE phase != 'closed' ORDER BY created_at, session_id", "unclosed_sessions"),
        (
            "SELECT session_id FROM sessions WHERE phase = 'closed' AND closed_at < 5 ORDER BY closed_at LIMIT 1",
            "closed_",
        ),
    ],
)
async def test_what_is_asked_of_the_store_again_and_again_reads_no_more_than_it_finds(
    tmp_path: Path, sql: str, index: str
) -> None:
    """A restart among a million closed sessions costs what the open ones cost."""
    async with SQLiteStore(tmp_path / "s.db"):
        with closing(sqlite3.connect(tmp_path / "s.db")) as connection:
            [plan] = connection.execute(f"EXPLAIN QUERY PLAN {sql}").fetchall()

    assert index in plan[3]
