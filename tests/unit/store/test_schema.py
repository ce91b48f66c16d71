"""Stores of earlier versions are opened as they are, and those of later ones are refused and left alone."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs

from harness.errors import StoreError
from harness.server.store.schema import (
    _EXACT_KEYS,
    _TEACHER_TOPS,
    _UNKNOWN_OUTPUT,
    _WORK_OF_HOLDS,
    FIRST_VERSION,
    SCHEMA_VERSION,
    STEPS,
)
from harness.server.store.sqlite import SQLiteStore, count_unknown, read_sessions
from harness.sessions.gate import Hold, HoldKind
from harness.sessions.ledger import Unknown
from harness.sessions.session import Session
from harness.sessions.session_config import SessionConfig
from harness.types import UnknownOutput

VERSION_2 = """
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY, api_key TEXT NOT NULL, phase TEXT NOT NULL, config TEXT NOT NULL,
    created_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE turns (
    session_id TEXT NOT NULL REFERENCES sessions, turn INTEGER NOT NULL, parent INTEGER, status TEXT NOT NULL,
    finish_reason TEXT NOT NULL, context_ids BLOB NOT NULL, prompt_length INTEGER NOT NULL, prompt_digest TEXT NOT NULL,
    output_ids BLOB NOT NULL, logprobs BLOB NOT NULL, version_spans TEXT NOT NULL, segments TEXT NOT NULL,
    messages_delta TEXT NOT NULL, reply TEXT NOT NULL, sampling TEXT NOT NULL, chain_key BLOB NOT NULL,
    ordinal INTEGER NOT NULL, request_digest TEXT NOT NULL, created_at REAL NOT NULL, seconds REAL NOT NULL,
    delivered INTEGER NOT NULL, notes TEXT NOT NULL, forced_tokens INTEGER NOT NULL, discarded TEXT NOT NULL,
    proximal_logprobs BLOB, proximal_versions BLOB, PRIMARY KEY (session_id, turn)
) WITHOUT ROWID;
INSERT INTO sessions VALUES ('a', 'sk-a', 'open', '{}', 1.0), ('b', 'sk-b', 'closed', '{}', 2.0);
INSERT INTO turns VALUES (
    'a', 0, NULL, 'completed', 'stop', x'05000000', 1, '', x'02000000', x'000080bf', '[]', '[]', '[]',
    '{"role":"assistant","content":"ok"}', '{"asked":{},"used":{}}', x'00', 0, 'd', 3.0, 0.5, 1, '{}', 0, '[]',
    NULL, NULL
);
PRAGMA user_version = 2;
"""
"""A store as the version wrote it that knew nothing of later ones; never edited."""


@pytest.fixture(name="old_store")
def _old_store(tmp_path: Path) -> Path:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_2)
    return path


def tables_of(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Columns of every table, and the indexes."""
    with closing(sqlite3.connect(path)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master ORDER BY name")]
        return {name: connection.execute(f"PRAGMA table_info({name})").fetchall() for name in names}


async def test_a_store_of_an_earlier_version_goes_on(old_store: Path) -> None:
    """Its sessions are there, it takes new ones, and it has the tables of a new store."""
    readable = read_sessions(old_store)
    async with SQLiteStore(old_store) as store:
        loaded = await store.load()
        await store.create(Session("c", "sk-c", SessionConfig(), 3.0))
    async with SQLiteStore(old_store.with_name("new.db")):
        pass

    assert [(session.session_id, len(session.turns)) for session in readable] == [("a", 1), ("b", 0)]
    assert [(session.session_id, session.turns[0].output_ids.tolist()) for session in loaded.sessions] == [("a", [2])]
    assert [session.session_id for session in read_sessions(old_store)] == ["a", "b", "c"]
    assert tables_of(old_store) == tables_of(old_store.with_name("new.db"))


async def test_a_store_from_before_unknown_output_reads_as_one_without_any(old_store: Path) -> None:
    """As it is and brought up to date; from then on it keeps what engines did not hand over."""
    with closing(sqlite3.connect(old_store)) as connection:
        for version, step in enumerate(STEPS[: STEPS.index(_UNKNOWN_OUTPUT)], start=FIRST_VERSION + 1):
            connection.executescript(f"{step} PRAGMA user_version = {version};")
    as_it_is, counted = read_sessions(old_store), count_unknown(old_store)
    lost = UnknownOutput("r", 7, "engine_connection_lost")
    async with SQLiteStore(old_store) as store:
        [loaded] = (await store.load()).sessions
        await store.commit("a", structs.replace(loaded.turns[0], unknown=(lost,)))

    assert [turn.unknown for session in as_it_is for turn in session.turns] == [()]
    assert (counted, loaded.ledger().unknown) == ({}, Unknown())
    [kept] = [session for session in read_sessions(old_store) if session.session_id == "a"]
    assert (kept.turns[0].unknown, kept.ledger().unknown) == ((lost,), Unknown(1, 7))
    assert count_unknown(old_store) == {"a": Unknown(1, 7)}


async def test_a_hold_from_before_holds_said_their_work_has_none(old_store: Path) -> None:
    """And one that is kept from then on comes back with it."""
    with closing(sqlite3.connect(old_store)) as connection:
        for version, step in enumerate(STEPS[: STEPS.index(_WORK_OF_HOLDS)], start=FIRST_VERSION + 1):
            connection.executescript(f"{step} PRAGMA user_version = {version};")
        connection.execute("INSERT INTO holds VALUES ('old', 'pause', 9.0, 1)")
        connection.commit()
    new = Hold("new", HoldKind.PAUSE, 8.0, engines=True, work="weights")
    async with SQLiteStore(old_store) as store:
        await store.keep_hold(new)
    async with SQLiteStore(old_store) as store:
        assert await store.load_holds() == [new, Hold("old", HoldKind.PAUSE, 9.0, engines=True)]


async def test_scores_from_before_teachers_returned_most_likely_tokens_have_none(old_store: Path) -> None:
    """As the store is, and brought up to date."""
    with closing(sqlite3.connect(old_store)) as connection:
        for version, step in enumerate(STEPS[: STEPS.index(_TEACHER_TOPS)], start=FIRST_VERSION + 1):
            connection.executescript(f"{step} PRAGMA user_version = {version};")
        connection.execute("""UPDATE sessions SET config = '{"teachers":["big"]}' WHERE session_id = 'a'""")
        connection.execute("INSERT INTO teacher_scores VALUES ('a', 0, 'big', '7', x'000080bf')")
        connection.commit()
    as_it_is = read_sessions(old_store)
    async with SQLiteStore(old_store) as store:
        [loaded] = (await store.load()).sessions
    for session in (as_it_is[0], loaded):
        scores = session.turns[0].teachers["big"]
        assert (scores.version, scores.logprobs.tolist(), scores.top) == ("7", [-1.0], None)


async def test_open_sessions_from_when_keys_covered_all_of_a_message_stay_exact(old_store: Path) -> None:
    """Beside what they were created with; closed ones stay as they are, and so does a damaged row."""
    old_configs = {"none": '{"metadata":{"a":1.50}}', "loose": '{"matching":["json_numbers"]}', "damaged": "{"}
    with closing(sqlite3.connect(old_store)) as connection:
        for version, step in enumerate(STEPS[: STEPS.index(_EXACT_KEYS)], start=FIRST_VERSION + 1):
            connection.executescript(f"{step} PRAGMA user_version = {version};")
        for name, config in old_configs.items():
            row = (name, f"sk-{name}", "closing", config)
            connection.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, 4.0, NULL, NULL)", row)
        connection.commit()
    async with SQLiteStore(old_store) as store:
        await store.create(Session("c", "sk-c", SessionConfig(), 3.0))
        with closing(sqlite3.connect(old_store)) as connection:
            configs = dict(connection.execute("SELECT session_id, config FROM sessions WHERE session_id != 'c'"))
        loaded = await store.load()

    assert configs == {
        "a": '{"matching":["exact"]}',
        "b": "{}",
        "none": '{"metadata":{"a":1.50},"matching":["exact"]}',
        "loose": '{"matching":["json_numbers","exact"]}',
        "damaged": "{",
    }
    assert {session.session_id: session.config.matching for session in loaded.sessions} == {
        "a": ("exact",),
        "none": ("exact",),
        "loose": ("json_numbers", "exact"),
        "c": (),
    }
    assert [each.session_id for each in loaded.damaged] == ["damaged"]


async def test_a_store_of_a_later_version_is_refused_by_name(old_store: Path) -> None:
    """Nothing in it is touched: who wrote it can continue with it."""
    with closing(sqlite3.connect(old_store)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    before = old_store.read_bytes()

    with pytest.raises(StoreError, match=rf"old\.db has store version {SCHEMA_VERSION + 1}, written by a newer"):
        await SQLiteStore(old_store).__aenter__()
    with pytest.raises(StoreError, match="written by a newer"):
        read_sessions(old_store)

    assert old_store.read_bytes() == before


async def test_a_store_before_the_first_readable_version_is_refused(old_store: Path) -> None:
    """With the version that it has and those that can be read."""
    with closing(sqlite3.connect(old_store)) as connection:
        connection.execute("PRAGMA user_version = 1")

    with pytest.raises(StoreError, match=f"store version 1, this harness reads {FIRST_VERSION} and up"):
        await SQLiteStore(old_store).__aenter__()
