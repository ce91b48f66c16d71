"""What the store keeps comes back as it was, and what is not a store is refused with a sentence."""

import asyncio
import gc
import inspect
import json
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs

from harness.errors import EngineUnavailable, HarnessError, StoreError
from harness.samples.delivery import Selection
from harness.server.store.base import LoadedSessions, MemoryStore, SessionStore
from harness.server.store.sqlite import (
    SQLiteStore,
    count_generated,
    open_store,
    read_hold_times,
    read_session,
    read_sessions,
)
from harness.sessions.admission import Limits
from harness.sessions.gate import Hold, HoldKind
from harness.sessions.lifecycle import Phase
from harness.sessions.script import Step
from harness.sessions.session import Session
from harness.sessions.session_config import AfterIncomplete, SessionConfig
from harness.turn_ends import TurnEnd, TurnStatus
from harness.types import Discarded, FinishReason, SamplingWishes, Turn
from tests.builders import admit, assistant, fail, finish, new_session, take_turn, user

RICH = SessionConfig(
    metadata={"task": "日本語", "nested": {"list": [1, None, 2.5, True]}, "big": 2**63},
    limits=Limits(turns=5, tokens_per_turn=100),
    sampling=SamplingWishes(temperature=0.0, seed=2**63 - 1, stop=("a", "b")),
    after_incomplete=AfterIncomplete.SERVE,
    selection=Selection.ONE,
    script=(Step((3, 4, 2), ends_turn=True), Step((5,), ends_turn=False)),
)


@pytest.mark.parametrize("store", [MemoryStore, SQLiteStore])
def test_a_store_takes_the_arguments_of_the_contract_by_name(store):
    for name, method in inspect.getmembers(SessionStore, inspect.isfunction):
        if not name.startswith("_"):
            wanted = inspect.signature(method).parameters
            inspect.signature(getattr(store, name)).bind(**dict.fromkeys(wanted, None))


def numbered(number: int, config: SessionConfig | None = None) -> Session:
    return Session(f"{number:032x}", f"sk-{number}", config or SessionConfig(), 1_000.0 + number)


async def keep(path, *sessions: Session) -> None:
    """Store sessions with all their turns."""
    async with SQLiteStore(path) as store:
        for session in sessions:
            await store.create(session)
            for turn in session.turns:
                await store.commit(session.session_id, turn)
            await store.set_phase(session)


async def load(path) -> list[Session]:
    async with open_store(path) as store:
        sessions, damaged = await store.load()
    assert not damaged
    return list(sessions)


COLUMNS = ("context_ids", "output_ids", "logprobs")


def everything(session: Session):
    """All a session knows, arrays as bytes and mappings as the JSON they are."""
    identity = (session.session_id, session.api_key, session.config, session.created_at, session.phase)
    return identity, [fields_of(turn) for turn in session.turns], session.ledger()


def fields_of(turn: Turn) -> dict:
    fields = {name: getattr(turn, name) for name in turn.__struct_fields__}
    columns = {name: (fields[name].dtype.str, fields[name].tobytes()) for name in COLUMNS}
    return fields | columns | {"sampling": json.loads(json.dumps(turn.sampling))}


def grown(number: int = 1, config: SessionConfig | None = None) -> Session:
    """A session with every kind of turn: stop, length, abort, failure, re-sample, delivered."""
    session = numbered(number, config or RICH)
    take_turn(session, [user("a")], "ünïcode \x00 NUL")
    history = [user("a"), assistant("ünïcode \x00 NUL"), user("b")]
    take_turn(session, history, "", reason=FinishReason.ABORT)
    take_turn(session, history, "cut", reason=FinishReason.LENGTH, version="7")
    fail(session, admit(session, history), EngineUnavailable("down"))
    session.mark_delivered(0)
    return session


async def test_a_session_comes_back_as_it_was(tmp_path):
    """Configuration, phase, every field of every turn, every bit of every column."""
    session = grown()

    await keep(tmp_path / "s.db", session)
    [read] = await load(tmp_path / "s.db")

    assert everything(read) == everything(session)


async def test_a_restored_session_goes_on_on_the_same_branch(tmp_path):
    """The next prompt is the same as it would have been without the restart, and so are index, seed and parent."""
    config = SessionConfig(sampling=SamplingWishes(seed=3))
    session = numbered(1, config)
    take_turn(session, [user("a")], "1")
    await keep(tmp_path / "s.db", session)
    [read] = await load(tmp_path / "s.db")

    after, expected = [admit(each, [user("a"), assistant("1"), user("b")]) for each in (read, session)]

    assert (after.index, after.parent, after.params) == (expected.index, expected.parent, expected.params)
    assert after.prompt_ids.tolist() == expected.prompt_ids.tolist()


async def test_closed_sessions_are_kept_and_not_taken_up(tmp_path):
    """A restart restores open, drained and ended ones; tools that look at a run see all of them."""
    sessions = [numbered(number) for number in range(4)]
    sessions[1].drain()
    sessions[2].end()
    sessions[3].close()
    await keep(tmp_path / "s.db", *sessions)

    assert [session.phase for session in await load(tmp_path / "s.db")] == list(Phase)[:3]
    assert [session.phase for session in read_sessions(tmp_path / "s.db")] == list(Phase)


async def test_a_session_that_takes_over_is_kept_with_its_turns_and_the_other_as_closed(tmp_path):
    """One step of the disk: there is no moment with the turns in two sessions, or in none; nothing is copied."""
    previous, session = grown(1), numbered(2, RICH)
    for turn in previous.turns:
        session.restore(turn)
    await keep(tmp_path / "s.db", previous)
    async with SQLiteStore(tmp_path / "s.db") as store:
        await store.take_over(session, previous)
        left, taken = read_sessions(tmp_path / "s.db")

    assert (left.phase, everything(taken)) == (Phase.CLOSED, everything(session))
    assert len(left.turns) == 0


async def test_turns_that_are_not_taken_over_stay_where_they_are(tmp_path):
    """A failed one, for instance: its tokens are those of the session that it was in."""
    previous, session = grown(1), numbered(2, RICH)
    for turn in previous.turns[:2]:
        session.restore(structs.replace(turn, delivered=False))
    await keep(tmp_path / "s.db", previous)
    async with SQLiteStore(tmp_path / "s.db") as store:
        await store.take_over(session, previous)

    with closing(sqlite3.connect(tmp_path / "s.db")) as connection:
        rows = connection.execute("SELECT session_id, turn, delivered FROM turns ORDER BY turn").fetchall()
    assert rows == [
        (session.session_id, 0, 0),
        (session.session_id, 1, 0),
        (previous.session_id, 2, 0),
        (previous.session_id, 3, 0),
    ]


async def test_a_takeover_that_fails_changes_nothing(tmp_path):
    """Not even what it had written before: a turn that the store does not have cannot move."""
    previous, session = grown(1), numbered(2, RICH)
    session.restore(previous.turns[0])
    session.restore(structs.replace(previous.turns[1], index=77))
    await keep(tmp_path / "s.db", previous)
    async with SQLiteStore(tmp_path / "s.db") as store:
        with pytest.raises(StoreError, match="expected 4 rows to change, 3 did"):
            await store.take_over(session, previous)
        [read] = read_sessions(tmp_path / "s.db")

    assert everything(read) == everything(previous)


async def test_delivery_is_noted(tmp_path):
    """The note reaches the file when the store is left."""
    session = numbered(1)
    turn = take_turn(session, [user("a")], "1")
    async with SQLiteStore(tmp_path / "s.db") as store:
        await store.create(session)
        await store.commit(session.session_id, turn)
        store.mark_delivered(session.session_id, turn.index)

    assert [turn.delivered for turn in read_sessions(tmp_path / "s.db")[0].turns] == [True]


async def test_many_writers_at_once_are_all_durable(tmp_path):
    """Writes are committed in groups; each waiter is woken when its own group is on disk."""
    sessions = [numbered(number) for number in range(200)]
    for session in sessions:
        take_turn(session, [user("a")], f"answer of {session.session_id}")
    async with SQLiteStore(tmp_path / "s.db") as store:
        await asyncio.gather(*(store.create(session) for session in sessions))
        await asyncio.gather(*(store.commit(session.session_id, session.turns[0]) for session in sessions))
        seen = read_sessions(tmp_path / "s.db")  # another connection, before anything is closed

    assert [everything(session) for session in seen] == [everything(session) for session in sessions]


async def test_a_write_that_fails_is_an_error_for_who_waits_and_the_store_goes_on(tmp_path):
    """A session cannot be created twice; what was kept stays as it was and turns continue being kept."""
    session = numbered(1)
    turn = take_turn(session, [user("a")], "1")
    async with SQLiteStore(tmp_path / "s.db") as store:
        await store.create(session)
        await store.commit(session.session_id, turn)
        with pytest.raises(StoreError, match=r"s\.db"):
            await store.create(session)
        second = finish(session, admit(session, [user("b")]), "2")
        await store.commit(session.session_id, second)

    assert [turn.index for turn in read_sessions(tmp_path / "s.db")[0].turns] == [0, 1]


async def test_another_outcome_of_a_turn_takes_the_place_of_the_first(tmp_path):
    """A turn that broke off and continued is one row."""
    session = numbered(1)
    turn = take_turn(session, [user("a")], "1")
    async with SQLiteStore(tmp_path / "s.db") as store:
        await store.create(session)
        await store.commit(
            session.session_id, structs.replace(turn, end=TurnEnd.CLIENT_LEFT, status=TurnStatus.ABORTED)
        )
        await store.commit(session.session_id, turn)

    assert [kept.end for kept in read_sessions(tmp_path / "s.db")[0].turns] == [TurnEnd.MODEL]


async def test_a_value_that_cannot_be_stored_does_not_end_the_writer(tmp_path):
    """An index beyond 64 bits fails alone; whoever comes next is served."""
    session = numbered(1)
    turn = take_turn(session, [user("a")], "1")
    async with SQLiteStore(tmp_path / "s.db") as store:
        await store.create(session)
        with pytest.raises(StoreError):
            await store.commit(session.session_id, structs.replace(turn, prompt_length=2**70))
        async with asyncio.timeout(30):
            await store.commit(session.session_id, turn)


async def test_a_waiter_that_is_cancelled_harms_nobody(tmp_path):
    """Its write may or may not be kept; the others' are."""
    sessions = [numbered(number) for number in range(20)]
    async with SQLiteStore(tmp_path / "s.db") as store:
        tasks = [asyncio.create_task(store.create(session)) for session in sessions]
        await asyncio.sleep(0)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)

    assert all(result is None for result in results[1:])
    assert len(read_sessions(tmp_path / "s.db")) >= 19


async def test_what_was_generated_is_counted_without_reading_a_session(tmp_path):
    """Every sampled token of every session, discarded ones included, as the sessions themselves count."""
    sessions = [grown(1), grown(2), numbered(3)]
    discarded = (Discarded("r", 5, "restarted"), Discarded("s", 7, "after_stop"))
    await keep(tmp_path / "s.db", *sessions)
    async with SQLiteStore(tmp_path / "s.db") as store:
        await store.commit(sessions[0].session_id, structs.replace(sessions[0].turns[0], discarded=discarded))

    read = {
        session.session_id: sum(turn.sampled_tokens for turn in session.turns)
        for session in read_sessions(tmp_path / "s.db")
    }
    assert count_generated(tmp_path / "s.db") == read
    assert read[sessions[0].session_id] == read[sessions[1].session_id] + 12
    assert read[sessions[2].session_id] == 0


async def test_one_session_is_read_without_the_others(tmp_path):
    """Damage elsewhere does not matter; one that is not there is named."""
    await keep(tmp_path / "s.db", grown(1), grown(2))
    with closing(sqlite3.connect(tmp_path / "s.db")) as connection:
        connection.execute("UPDATE turns SET reply = '{' WHERE session_id = ?", (numbered(1).session_id,))
        connection.commit()

    assert everything(read_session(tmp_path / "s.db", numbered(2).session_id)) == everything(grown(2))
    with pytest.raises(StoreError, match="no session nobody"):
        read_session(tmp_path / "s.db", "nobody")


def foreign(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.commit()


def other_version(path):
    asyncio.run(keep(path))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


NOT_A_STORE = {
    "text": (lambda path: path.write_text("not a database, and long enough to be read as one " * 50), "not a database"),
    "another database": (foreign, "not a session store"),
    "a newer version": (other_version, "version 99, written by a newer harness"),
    "a directory": (lambda path: path.mkdir(), "s.db"),
}


@pytest.mark.parametrize(("arrange", "message"), NOT_A_STORE.values(), ids=NOT_A_STORE)
def test_what_is_not_a_store_is_refused_and_left_alone(tmp_path, arrange, message):
    """One line that names the file; its content stays as it was."""
    path = tmp_path / "s.db"
    arrange(path)
    before = path.read_bytes() if path.is_file() else None

    with pytest.raises(StoreError, match=message) as caught:
        asyncio.run(load(path))

    assert "\n" not in caught.value.message
    assert "s.db" in caught.value.message
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_missing_directory_is_named(tmp_path):
    """A store is created, the directories above it are not."""
    with pytest.raises(StoreError, match=r"no such directory: .*nowhere"):
        asyncio.run(load(tmp_path / "nowhere" / "s.db"))


def test_looking_at_a_store_that_is_not_there_creates_none(tmp_path):
    """A typo in a path does not leave an empty file behind."""
    with pytest.raises(StoreError, match="no file"):
        read_sessions(tmp_path / "typo.db")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE turns SET reply = '{'",
        "UPDATE turns SET messages_delta = '[5]'",
        f"UPDATE turns SET messages_delta = '{'[' * 5_000}{']' * 5_000}'",
        f"UPDATE turns SET notes = '{'[' * 5_000}'",
        "UPDATE turns SET status = 'excellent'",
        "UPDATE turns SET output_ids = x'010203'",
        "UPDATE turns SET parent = 77",
        "UPDATE turns SET logprobs = x'00000000'",
        "UPDATE turns SET proximal_logprobs = x'00000000', proximal_versions = x'00000000'",
        "UPDATE sessions SET phase = 'half open'",
        "UPDATE sessions SET config = '[]'",
    ],
    ids=lambda damage: damage[:60],
)
async def test_a_damaged_session_is_named_and_the_others_are_loaded(tmp_path, damage):
    """One bad row costs its own session: a server starts, a tool that reads all of them says which it is."""
    damaged, sound = grown(1), grown(2)
    await keep(tmp_path / "s.db", damaged, sound)
    with closing(sqlite3.connect(tmp_path / "s.db")) as connection:
        connection.execute(f"{damage} WHERE session_id = ?", (damaged.session_id,))
        connection.commit()

    async with open_store(tmp_path / "s.db") as store:
        loaded = await store.load()
    with pytest.raises(StoreError, match=f"session {damaged.session_id} is damaged"):
        read_sessions(tmp_path / "s.db")

    assert [everything(session) for session in loaded.sessions] == [everything(sound)]
    assert [(each.session_id, each.api_key) for each in loaded.damaged] == [(damaged.session_id, damaged.api_key)]


async def test_a_store_leaves_no_thread_and_no_open_file(tmp_path):
    """Neither after use nor after a refusal to open."""
    (tmp_path / "bad.db").write_text("not a database" * 100)
    await keep(tmp_path / "s.db", grown())
    gc.collect()
    before = open_files()
    for _ in range(3):
        await load(tmp_path / "s.db")
        with pytest.raises(HarnessError):
            await load(tmp_path / "bad.db")
    gc.collect()

    assert "session-store" not in {thread.name for thread in threading.enumerate()}
    assert open_files() == before


def open_files() -> list[str]:
    """Database files that this process holds open."""
    links = [Path("/proc/self/fd", name).resolve() for name in descriptors()]
    return sorted(str(link) for link in links if ".db" in link.name)


def descriptors() -> list[str]:
    return [path.name for path in Path("/proc/self/fd").iterdir()]


async def test_memory_keeps_nothing():
    async with open_store("memory") as store:
        session = new_session()
        await store.create(session)
        await store.commit(session.session_id, take_turn(session, [user("a")], "1"))
        store.mark_delivered(session.session_id, 0)
        await store.set_phase(session)

        assert await store.load() == LoadedSessions()


async def test_only_its_owner_reads_a_store(tmp_path):
    """The keys of sessions are in it: in the file, in its log and in what processes share."""
    async with SQLiteStore(tmp_path / "s.db") as store:
        await store.create(numbered(1))
        modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.glob("s.db*") if "claim" not in each.name}

    assert modes == {"s.db": 0o600, "s.db-wal": 0o600, "s.db-shm": 0o600}


async def test_the_mode_that_an_operator_gave_a_store_stays(tmp_path):
    path = tmp_path / "s.db"
    path.touch(mode=0o640)
    path.chmod(0o640)
    async with SQLiteStore(path):
        assert path.stat().st_mode & 0o777 == 0o640


async def test_a_store_says_later_when_a_hold_was_on_the_gate(tmp_path: Path):
    """Renewed it is the same, made stronger another one, and over when it is dropped or has run out."""
    path = tmp_path / "run.db"
    hour = time.time() + 3600
    before = time.time()
    async with SQLiteStore(path) as store:
        await store.keep_hold(Hold("a", HoldKind.PAUSE, hour))
        await store.keep_hold(Hold("a", HoldKind.PAUSE, hour + 1))
        await store.keep_hold(Hold("b", HoldKind.PAUSE, hour, engines=True))
        await store.keep_hold(Hold("a", HoldKind.DRAIN, hour))
    async with SQLiteStore(path) as store:
        await store.keep_hold(Hold("b", HoldKind.PAUSE, 0.0, engines=True))
        await store.drop_hold("b")
        await store.drop_hold("nobody")
    held = read_hold_times(path)

    kinds = [(each.holder, str(each.kind), each.engines, each.ended_at is None) for each in held]
    assert kinds == [("a", "pause", False, False), ("b", "pause", True, False), ("a", "drain", False, True)]
    times = [(each.began_at, each.ended_at) for each in held]
    assert times[0][1] == times[2][0]
    for began_at, ended_at in times:
        assert before - 0.002 <= began_at <= (ended_at or hour) <= hour


async def test_holds_of_a_store_that_did_not_note_them_are_none(tmp_path: Path):
    path = tmp_path / "run.db"
    async with SQLiteStore(path) as store:
        await store.keep_hold(Hold("a", HoldKind.PAUSE, time.time() + 3600))
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("DROP TRIGGER note_kept_hold; DROP TRIGGER note_dropped_hold; DROP TABLE hold_times;")

    assert read_hold_times(path) == []
