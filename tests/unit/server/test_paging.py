"""A session that nobody uses is kept by the store alone, and whoever asks for it next finds it as it was."""

import asyncio
import sqlite3
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.errors import ScenarioError, StoreError
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import SQLiteStore
from harness.sessions.paging import SessionStub
from harness.types import Turn
from tests.builders import toy_tokenizer, user
from tests.session_servers.served import (
    Client,
    Served,
    SetClock,
    eventually,
    says,
    serving,
    serving_with,
    session_on,
    url_of,
)

IDLE_S = 60.0
SETTINGS = ServerSettings(idle_page_out_s=IDLE_S)


async def page_out(client: Client, clock: SetClock) -> int:
    """How many sessions are paged out when all have been idle for long enough, by this call or by the server itself."""
    before = paged_out_sessions(client)
    clock.now += IDLE_S
    await client.server.sessions.page_out_idle()
    return paged_out_sessions(client) - before


def paged_out_sessions(client: Client) -> int:
    return len(client.server.sessions._held._stubs)


def is_paged_out(client: Client, session: Served) -> bool:
    return session.session_id in client.server.sessions._held._stubs


async def converse(client: Client, session: Served, turns: int) -> list[Any]:
    """A conversation of so many turns; the history after it."""
    messages = await client.converse(session, turns)
    await delivered(client, session, turns)
    return messages


async def delivered(client: Client, session: Served, turns: int) -> None:
    """Return when so many answers have been handed over, in memory and in the file, and no call uses the session."""
    held = client.server.sessions.in_memory(session.session_id)
    assert held is not None
    await eventually(lambda: sum(turn.delivered for turn in held.turns) == turns)
    await client.server._turns.store.set_phase(held)  # behind the notes
    await eventually(lambda: not client.server.sessions._held._is_in_use(session.session_id))


async def test_a_session_that_is_paged_out_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its record, its samples, its place in the list and its next turn are those of one that stayed."""
    clock = SetClock()
    async with serving(*says("one", "two", "three"), store=tmp_path / "s.db", settings=SETTINGS, clock=clock) as client:
        session = await client.create(metadata={"task": 7})
        messages = await converse(client, session, 2)
        assert (await client.chat(session, [user("x")], max_tokens=0)).status_code == 400
        path, listing = f"/sessions/{session.session_id}", (await client.http.get("/sessions")).json()
        before = [(await client.http.get(f"{path}{end}")).json() for end in ("", "/samples", "/facts")]

        assert await page_out(client, clock) == 1
        paged_out = (await client.http.get("/metrics")).text
        assert (await client.http.get("/sessions")).json() == listing
        assert is_paged_out(client, session)
        assert [(await client.http.get(f"{path}{end}")).json() for end in ("", "/samples", "/facts")] == before
        assert not is_paged_out(client, session)

        assert await page_out(client, clock) == 1
        await client.say(session, [*messages, user("question 2")])
        first, *_, last = (await client.record(session))["turns"]
        metrics = (await client.http.get("/metrics")).text

    assert last["parent"] == 1
    assert last["prompt_ids"][: len(first["prompt_ids"])] == first["prompt_ids"]
    assert "harness_sessions_paged_out 1.0" in paged_out
    assert "harness_sessions_open 1.0" in paged_out
    assert "harness_sessions_paged_out 0.0" in metrics
    assert "harness_session_read_back_seconds_count 2.0" in metrics


async def test_a_stub_is_small_however_long_its_session_is(tmp_path: Path) -> None:
    """2 KiB at most, with everything that only it refers to."""
    clock = SetClock()
    async with session_on(*says("one"), store=tmp_path / "s.db", settings=SETTINGS, clock=clock) as (client, session):
        await converse(client, session, 40)
        await page_out(client, clock)
        stub = client.server.sessions.look(session.session_id)

    assert isinstance(stub, SessionStub)
    assert sum(sys.getsizeof(each) for each in _parts(stub)) <= 2048


def _parts(value: Any) -> Iterable[Any]:
    yield value
    match value:
        case dict():
            inner = [*value.keys(), *value.values()]
        case tuple():
            inner = list(value)
        case _:
            slots = getattr(type(value), "__dataclass_fields__", {})
            inner = [getattr(value, name) for name in slots]
    for each in inner:
        yield from _parts(each)


async def test_it_is_found_by_its_key(tmp_path: Path) -> None:
    """Which only the store has in full."""
    clock, settings = SetClock(), ServerSettings(idle_page_out_s=IDLE_S, admin_token="secret")
    async with session_on(store=tmp_path / "s.db", settings=settings, clock=clock) as (client, session):
        await page_out(client, clock)
        wrong = await client.http.post(url_of(session), json={}, headers={"authorization": "Bearer sk-harness-0"})
        was_left_alone = is_paged_out(client, session)
        right = await client.chat(session, [user("hello")])

    assert (wrong.status_code, was_left_alone, right.status_code) == (404, True, 200)


async def test_a_session_in_use_stays(tmp_path: Path) -> None:
    """With a turn in flight, or one at the gate; and one that somebody holds is the same object afterwards."""
    clock, hanging = SetClock(), ScriptStep(text="slow", fault=ScriptedFault.HANG)
    async with serving(hanging, store=tmp_path / "s.db", settings=SETTINGS, clock=clock) as client:
        in_flight, held, watched = [await client.create() for _ in range(3)]
        calls = [asyncio.create_task(client.chat(in_flight, [user("a")]))]
        await client.turns_in_flight(1)
        await client.http.post("/sessions/pause")
        calls.append(asyncio.create_task(client.chat(held, [user("b")])))
        await client.held(1)
        somebodys = client.server.sessions.in_memory(watched.session_id)

        assert await page_out(client, clock) == 1
        assert client.server.sessions.in_memory(watched.session_id) is None
        assert await client.server.sessions.find(watched.session_id) is somebodys
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_drain_reaches_what_is_paged_out(tmp_path: Path) -> None:
    """Unread, for good, and over a restart; it can be collected, and taken over, as any drained session."""
    clock, path = SetClock(), tmp_path / "s.db"
    async with serving(*says("one", "two"), store=path, settings=SETTINGS, clock=clock) as client:
        session, other = await client.create(), await client.create()
        messages = await converse(client, session, 1)
        assert await page_out(client, clock) == 2
        drained = (await client.http.post("/sessions/drain")).json()
        again = (await client.http.post("/sessions/drain")).json()
        was_left_alone = is_paged_out(client, session)
        await client.http.post("/sessions/resume")
        refused = await client.chat(other, [user("hello")])
    async with serving(*says("one", "two"), store=path, settings=SETTINGS, clock=clock) as client:
        still = await client.chat(other, [user("hello")])
        assert client.restored == len(client.server.sessions) == 2
        assert is_paged_out(client, session)  # it was read once, and only its stub was kept
        successor = await client.create(resumes=session.session_id)
        assert await client.say(successor, messages[:1]) == messages[1]

    assert (drained["sessions_closed"], again["sessions_closed"], was_left_alone) == (2, 0, True)
    assert [(each.status_code, each.json()["error"]["code"]) for each in (refused, still)] == [
        (404, "session_closed")
    ] * 2


async def test_a_retry_finds_its_turn(tmp_path: Path) -> None:
    """An answer that nobody was handed is replayed from the file; nothing is sampled twice (I5)."""
    clock = SetClock()
    async with serving(*says("one", "two"), store=tmp_path / "s.db", settings=SETTINGS, clock=clock) as client:
        session = await client.create()
        said = await client.say(session, [user("a")])
        await delivered(client, session, 1)
        held = client.server.sessions.in_memory(session.session_id)
        assert held is not None
        held.mark_delivered(0, delivered=False)
        client.server._turns.store.mark_delivered(session.session_id, 0, delivered=False)
        await client.server._turns.store.set_phase(held)
        del held
        assert await page_out(client, clock) == 1
        replayed = await client.say(session, [user("a")])
        record = await client.record(session)

    assert replayed == said
    assert len(record["turns"]) == 1


async def test_after_a_restart_a_last_answer_is_in_doubt(tmp_path: Path) -> None:
    """Of a session that is paged out, too: whoever asks again gets it, and it can be paged out again."""
    clock, path = SetClock(), tmp_path / "s.db"
    async with session_on(*says("one", "two"), store=path, settings=SETTINGS, clock=clock) as (client, session):
        messages = await converse(client, session, 1)
    async with serving(*says("one", "two"), store=path, settings=SETTINGS, clock=clock) as client:
        assert is_paged_out(client, session)
        assert await client.say(session, messages[:1]) == messages[1]
        assert len((await client.record(session))["turns"]) == 1
        await delivered(client, session, 1)
        assert await page_out(client, clock) == 1


async def test_doubt_in_the_agents_answer_costs_no_session(tmp_path: Path) -> None:
    """Of two answers to one prompt another one is then trained, so the ledger is another than that of the rows."""
    clock, path = SetClock(), tmp_path / "s.db"
    async with session_on(*says("one", "two more"), store=path, settings=SETTINGS, clock=clock) as (client, session):
        said = [await client.say(session, [user("a")]) for _ in range(2)]
        await delivered(client, session, 2)
        client.server._turns.store.mark_delivered(session.session_id, 1, delivered=False)
    async with serving(*says("one"), store=path, settings=SETTINGS, clock=clock) as client:
        assert is_paged_out(client, session)
        record = await client.record(session)

    assert [each["content"] for each in said] == ["one", "two more"]
    assert [turn["role"] for turn in record["turns"]] == ["resample", "main"]
    assert record["ledger"]["trained"] == len(record["turns"][1]["output_ids"])


async def test_a_session_whose_rows_are_gone_is_an_error_for_itself_alone(tmp_path: Path) -> None:
    """503 for whoever asks, sweeps continue, the others are served, and it can be deleted."""
    clock, path = SetClock(), tmp_path / "s.db"
    async with serving(*says("one", "two"), store=path, settings=SETTINGS, clock=clock) as client:
        gone, cut, sound = [await client.create() for _ in range(3)]
        for session in (gone, cut, sound):
            messages = await converse(client, session, 2)
        assert await page_out(client, clock) == 3
        with closing(sqlite3.connect(path)) as connection:
            for table in ("turns", "sessions"):
                connection.execute(f"DELETE FROM {table} WHERE session_id = ?", (gone.session_id,))
            connection.execute("DELETE FROM turns WHERE session_id = ? AND turn = 1", (cut.session_id,))
            connection.commit()
        turns = [await client.chat(each, [*messages, user("c")]) for each in (gone, cut, sound)]
        collected = await client.http.get(f"/sessions/{gone.session_id}/samples")
        await client.engine.update_weights(tmp_path, "1")
        swept = (await client.http.post("/sessions/sweep", json={"version": 1})).json()
        deleted = [(await client.http.delete(f"/sessions/{each.session_id}")).status_code for each in (gone, cut)]
        left = [each["session_id"] for each in (await client.http.get("/sessions")).json()["sessions"]]

    assert [each.status_code for each in turns] == [503, 503, 200]
    assert (collected.status_code, collected.json()["error"]["code"]) == (503, "store_failed")
    assert swept["failures"] == {"store_failed": 2}
    assert swept["tokens_settled"] > 0
    assert (deleted, left) == ([204, 204], [sound.session_id])


async def test_a_sweep_scores_what_is_paged_out_and_leaves_it_there(tmp_path: Path) -> None:
    """Every token meets its next version, as in a session that stayed."""
    clock = SetClock()
    async with serving(*says("one", "two"), store=tmp_path / "s.db", settings=SETTINGS, clock=clock) as client:
        sessions = [await client.create() for _ in range(3)]
        for session in sessions:
            await converse(client, session, 2)
        clock.now += IDLE_S
        await client.record(sessions[0])
        await client.server.sessions.page_out_idle()
        assert paged_out_sessions(client) == 2
        await client.engine.update_weights(tmp_path, "1")
        report = (await client.http.post("/sessions/sweep", json={"version": 1})).json()
        again = (await client.http.post("/sessions/sweep", json={"version": 1})).json()
        where = [is_paged_out(client, session) for session in sessions]
        columns = [(await client.samples(session))[0] for session in sessions]

    assert (report["sessions"], report["sessions_done"], report["tokens_left"]) == (3, 3, 0)
    assert report["tokens_settled"] == report["tokens_waiting"] > 0
    assert (again["requests"], again["tokens_waiting"]) == (0, 0)
    assert where == [False, True, True]
    for sample in columns:
        sampled = [at for at, version in enumerate(sample["behavior_versions"]) if version >= 0]
        assert {sample["proximal_versions"][at] for at in sampled} == {1}


async def test_what_is_paged_out_expires_unread(tmp_path: Path) -> None:
    """After the idle time to live, from its last use on."""
    clock, settings = SetClock(), ServerSettings(idle_page_out_s=IDLE_S, idle_ttl_s=3 * IDLE_S)
    async with serving(store=tmp_path / "s.db", settings=settings, clock=clock) as client:
        for _ in range(3):
            await client.create()
        assert await page_out(client, clock) == 3
        clock.now += IDLE_S
        early = await client.server.sessions.expire()
        clock.now += IDLE_S
        assert (early, await client.server.sessions.expire(), len(client.server.sessions)) == (0, 3, 0)
    with closing(sqlite3.connect(tmp_path / "s.db")) as connection:
        assert {*connection.execute("SELECT phase, closed_because FROM sessions")} == {("closed", "idle")}


async def test_what_cannot_be_paged_out_expires_all_the_same(tmp_path: Path) -> None:
    """From its last use on, however often it was tried."""
    clock, settings = SetClock(), ServerSettings(idle_page_out_s=IDLE_S, idle_ttl_s=3 * IDLE_S)
    async with serving(store=tmp_path / "s.db", settings=settings, clock=clock) as client:
        held = client.server.sessions.in_memory((await client.create()).session_id)
        assert held is not None
        held.end()  # which its row does not say
        tried = [await page_out(client, clock) for _ in range(3)]
        await client.server.sessions.expire()  # unless the server itself has just done it
        left = len(client.server.sessions)

    assert (tried, left) == ([0, 0, 0], 0)


async def test_a_session_of_the_same_id_is_another_one(tmp_path: Path) -> None:
    """Whoever still has the one that was deleted does not put it in the place of the one that is paged out."""
    clock, session_id = SetClock(), "ab" * 16
    async with serving(store=tmp_path / "s.db", settings=SETTINGS, clock=clock) as client:
        session = await client.create(session_id=session_id)
        deleted = client.server.sessions.in_memory(session_id)
        assert deleted is not None
        await client.http.delete(f"/sessions/{session_id}")
        clock.now += IDLE_S
        await client.server._turns.store.forget_closed(IDLE_S / 2, 1)
        await client.create(session_id=session_id)
        assert await page_out(client, clock) == 1
        with client.server.sessions.in_use(deleted):
            assert is_paged_out(client, session)


async def test_many_who_ask_at_once_have_it_read_once(tmp_path: Path) -> None:
    """And all of them are served."""
    clock = SetClock()
    async with session_on(store=tmp_path / "s.db", settings=SETTINGS, clock=clock) as (client, session):
        await page_out(client, clock)
        answers = await asyncio.gather(*(client.chat(session, [user(str(number))]) for number in range(8)))
        turns = (await client.record(session))["turns"]
        metrics = (await client.http.get("/metrics")).text

    assert ([answer.status_code for answer in answers], len(turns)) == ([200] * 8, 8)
    assert "harness_session_read_back_seconds_count 1.0" in metrics


class ForgetfulStore(SQLiteStore):
    """Refuses turns and reads while it is told to."""

    refuses = ""

    async def commit(self, session_id: str, turn: Turn) -> None:
        """See `SessionStore`."""
        if self.refuses == "commit":
            raise StoreError("the disk is gone")
        await super().commit(session_id, turn)

    async def outline(self, session_id: str) -> Any:
        """See `SessionStore`."""
        if self.refuses == "outline":
            raise StoreError("the disk is gone")
        return await super().outline(session_id)


async def test_what_the_store_does_not_have_stays_in_memory(tmp_path: Path) -> None:
    """A turn that could not be made durable is in no row, so its session is not let go, and its ledger is whole."""
    clock = SetClock()
    engine, store = ScriptedEngine(toy_tokenizer(), Script(says("one", "two"))), ForgetfulStore(tmp_path / "s.db")
    async with serving_with(engine, store=store, settings=SETTINGS, clock=clock) as client:
        session = await client.create()
        messages = await converse(client, session, 1)
        store.refuses = "commit"
        refused = await client.chat(session, [*messages, user("more")])
        lost = await page_out(client, clock)
        store.refuses = "outline"
        await client.create()
        unread = await page_out(client, clock)
        store.refuses = ""
        found = await page_out(client, clock)
        ledger = (await client.record(session))["ledger"]

    assert refused.status_code == 503
    assert (lost, unread, found) == (0, 0, 1)
    assert ledger["generated"] == ledger["trained"] + sum(ledger["dropped"].values()) > 0


async def test_a_server_that_keeps_nothing_is_refused_at_the_start() -> None:
    """By the name of the setting and of the option."""
    with pytest.raises(ScenarioError, match=r"idle_page_out_s: expected a store in a file .*--idle-page-out"):
        async with serving(settings=SETTINGS):
            pass


async def test_times_of_turns_read_no_session_back(tmp_path: Path):
    """Whoever looks at a server again and again keeps none of its sessions in memory."""
    clock = SetClock()
    async with serving(*says("One."), store=tmp_path / "run.db", settings=SETTINGS, clock=clock) as client:
        session = await client.create()
        await converse(client, session, 1)
        before = (await client.http.get(f"/sessions/times?from={session.session_id}:0")).json()["times"]
        await page_out(client, clock)
        after = (await client.http.get(f"/sessions/times?from={session.session_id}:0")).json()["times"]
        still = is_paged_out(client, session)

    assert [row[0] for row in before[session.session_id]] == [0]
    assert (after, still) == ({}, True)
