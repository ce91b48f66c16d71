"""Stores that were written before turns had ends are read, and continue."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from harness.engines.scripted import ScriptStep
from harness.errors import StoreError
from harness.server.store.sqlite import SQLiteStore, read_session, read_sessions
from harness.sessions.session import Session
from harness.turn_ends import TurnEnd
from harness.types import Json
from tests.builders import tool, user
from tests.session_servers.served import Served, says, serving, url_of
from tests.session_servers.store_file import ledger_of, read_file

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'  # byte for byte what was sent then
DUMP = Path(__file__).with_name("store_of_version_6.sql")
ANSWER = "a long answer"
ENDS = {
    "drained": [TurnEnd.DRAINED],
    "closed": [TurnEnd.ENGINE_ABORTED],  # it was drained before, which nothing tells any more
    "left behind": [],
    "taken over": [TurnEnd.CLIENT_LEFT],
    "finished": [TurnEnd.MODEL, TurnEnd.TOOL_CALLS, TurnEnd.LENGTH],
    "repeat": [TurnEnd.REPEAT],
    "engine aborted": [TurnEnd.ENGINE_ABORTED],
    "client left": [TurnEnd.CLIENT_LEFT],
    "engine failed": [TurnEnd.ENGINE_FAILED],
    "engine failed at once": [TurnEnd.ENGINE_FAILED],
    "gate timeout": [TurnEnd.GATE_TIMEOUT],
    "session ended": [TurnEnd.SESSION_ENDED],
    "stale": [TurnEnd.ENGINE_ABORTED],  # no error was noted of those
    "bug": [TurnEnd.SERVER_FAILED],
    "server stopped": [TurnEnd.SERVER_STOPPED],
}
WAITING = ["taken over", "client left", "engine failed", "gate timeout", "server stopped"]
"""Cases of open sessions with a partial output that waits."""


@pytest.fixture(name="old_store")
def _old_store(tmp_path: Path) -> Path:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(DUMP.read_text(encoding="utf-8"))
    return path


def ends_of(sessions: list[Session]) -> dict[str, list[TurnEnd]]:
    return {session.config.metadata["case"]: [turn.end for turn in session.turns] for session in sessions}


def old_session(path: Path, case: str) -> Session:
    """The session of that case, as the file has it."""
    return next(session for session in read_sessions(path) if session.config.metadata["case"] == case)


def known(session: Session) -> Served:
    """The session, as its owner knows it."""
    return Served(session.session_id, "", session.api_key)


async def test_each_turn_gets_the_end_that_its_row_tells(old_store: Path) -> None:
    """Read as it is, and brought up to date, it is the same."""
    as_it_is = ends_of(read_sessions(old_store))
    async with SQLiteStore(old_store):
        pass

    assert as_it_is == ends_of(read_sessions(old_store)) == ENDS


async def test_a_damaged_note_costs_its_session_and_no_other(old_store: Path) -> None:
    """The store is brought up to date all the same."""
    damaged = old_session(old_store, "client left").session_id
    with closing(sqlite3.connect(old_store)) as connection:
        connection.execute("UPDATE turns SET notes = '{' WHERE session_id = ?", (damaged,))
        connection.commit()
    async with SQLiteStore(old_store) as store:
        loaded = await store.load()

    assert [each.session_id for each in loaded.damaged] == [damaged]
    assert len(loaded.sessions) == len(ENDS) - 3  # those that are closed are not loaded


def readable(path: Path, sessions: list[str]) -> set[str]:
    """Those of `sessions` that can be read back."""
    found = set()
    for session_id in sessions:
        with suppress(StoreError):
            found.add(read_session(path, session_id).session_id)
    return found


async def test_a_damaged_page_costs_no_more_than_before(old_store: Path) -> None:
    """Bringing a store up to date reads no turn."""
    sessions = [session.session_id for session in read_sessions(old_store)]
    damaged = old_session(old_store, "client left").session_id
    with closing(sqlite3.connect(old_store)) as connection:
        long_row = (b"here" * 100_000, damaged)  # it has pages of its own
        connection.execute("UPDATE turns SET context_ids = ? WHERE session_id = ?", long_row)
        connection.commit()
        [page_bytes] = connection.execute("PRAGMA page_size").fetchone()
    content = bytearray(old_store.read_bytes())
    page = content.index(b"here" * (page_bytes // 8)) // page_bytes
    content[page * page_bytes : page * page_bytes + 4] = b"\xff" * 4  # the number of the next one
    old_store.write_bytes(content)

    before = readable(old_store, sessions)
    async with SQLiteStore(old_store) as store:
        loaded = await store.load()

    assert readable(old_store, sessions) == before
    assert damaged in {each.session_id for each in loaded.damaged}
    assert {session.session_id for session in loaded.sessions} <= before
    assert len(loaded.sessions) + len(loaded.damaged) == len(ENDS) - 2  # those that are closed are not loaded
    assert loaded.sessions


@pytest.mark.parametrize("case", WAITING)
async def test_a_turn_that_waits_in_an_old_store_is_taken_up(old_store: Path, case: str) -> None:
    """The same bytes get the whole answer, and what had been sampled is not sampled again."""
    old = old_session(old_store, case)
    session, before = known(old), old.turns[0].output_ids.tolist()
    async with serving(ScriptStep(text=ANSWER), store=old_store) as client:
        answer = await client.http.post(url_of(session), content=BODY)
        record = await client.record(session)

    [turn] = record["turns"]
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    assert (turn["end"], turn["notes"]["attempts"], len(turn["segments"])) == ("model", 2, 2)
    assert turn["output_ids"][: len(before)] == before
    assert ledger_of(read_file(old_store)[session.session_id]) == record["ledger"]
    assert record["ledger"]["dropped"] == {}


async def test_a_session_of_an_old_store_goes_on(old_store: Path) -> None:
    """A next turn stands behind an old one, token for token."""
    session = known(old_session(old_store, "finished"))
    tools = [tool(a={"type": "integer"})]
    async with serving(*says("and more"), store=old_store) as client:
        first = (await client.record(session))["turns"][0]
        await client.say(session, [user("hi"), first["reply"], user("another")], tools=tools)
        turns: list[Json] = (await client.record(session))["turns"]

    assert [turn["end"] for turn in turns] == ["model", "tool_calls", "length", "model"]
    behind = first["prompt_ids"] + first["output_ids"]
    assert (turns[-1]["parent"], turns[-1]["prompt_ids"][: len(behind)]) == (0, behind)
