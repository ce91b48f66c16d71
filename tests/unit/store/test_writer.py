"""Whatever happens to the thread that writes: everybody who waits gets an answer, and whoever comes later too."""

import asyncio
import ctypes
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.errors import StoreError
from harness.server.store.sqlite import SQLiteStore
from harness.sessions.session import Session
from harness.sessions.session_config import SessionConfig
from tests.builders import take_turn, user
from tests.checkout import ROOT
from tests.session_servers.served import session_on
from tests.session_servers.store_file import read_file

PATIENCE_S = 60

NO_MEMORY = """
import asyncio, sqlite3, sys
from dataclasses import replace
from msgspec import structs
from pathlib import Path
import numpy as np
from tests.builders import new_session, take_turn, user
from harness.errors import StoreError
from harness.server.store.sqlite import SQLiteStore

async def main():
    session = new_session()
    small = [take_turn(session, [user(str(number))], "ok") for number in range(4)]
    large = structs.replace(small[1], context_ids=np.zeros(8 << 20, dtype=np.int32))
    async with SQLiteStore(Path(sys.argv[1])) as store:
        await store.create(new_session())
        sqlite3.connect(":memory:").execute(f"PRAGMA hard_heap_limit = {16 << 20}")  # of the whole process, for good
        alone = [await commit(store, session, turn) for turn in (small[0], large, small[2])]
        together = await asyncio.gather(*(commit(store, session, turn) for turn in (small[0], large, small[3])))
        print(alone, together, store.problem)

async def commit(store, session, turn):
    try:
        async with asyncio.timeout(60):
            await store.commit(session.session_id, turn)
    except StoreError as error:
        return "out of memory" in error.message
    except TimeoutError:
        return "hangs"

asyncio.run(main())
"""


def numbered(number: int) -> Session:
    return Session(f"{number:032x}", f"sk-{number}", SessionConfig(), 1_000.0 + number)


def end_the_writer() -> None:
    """Raise SystemExit in the writer thread, at the next step that it takes."""
    [writer] = [thread for thread in threading.enumerate() if thread.name == "session-store"]
    assert writer.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(writer.ident), ctypes.py_object(SystemExit))


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Everything that this process opens in the block fails with EMFILE."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_write_that_finds_no_memory_fails_alone(tmp_path: Path) -> None:
    """A real SQLITE_NOMEM: that turn is refused by name, those before, beside and after it are kept."""
    command = [sys.executable, "-c", textwrap.dedent(NO_MEMORY), str(tmp_path / "s.db")]
    program = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)

    assert program.stdout == "[None, True, None] [None, True, None] None\n", program.stderr
    assert list(read_file(tmp_path / "s.db")["0" * 32].turns) == [0, 2, 3]


async def test_a_writer_that_ends_leaves_nobody_waiting(tmp_path: Path) -> None:
    """The write that it had in its hands, those in the queue and those that come later: one typed error each."""
    sessions = [numbered(number) for number in range(5)]
    async with asyncio.timeout(PATIENCE_S), SQLiteStore(tmp_path / "s.db") as store:
        await store.create(sessions[0])
        end_the_writer()
        at_once = await asyncio.gather(*(store.create(session) for session in sessions[1:4]), return_exceptions=True)
        with pytest.raises(StoreError, match=r"s\.db: the thread that writes it has ended \(SystemExit"):
            await store.create(sessions[4])
        store.mark_delivered(sessions[0].session_id, 0)

    assert [type(answer) for answer in at_once] == [StoreError] * 3


async def test_a_note_is_written_though_nothing_comes_behind_it(tmp_path: Path) -> None:
    """It waits for a write to go with, and not for long."""
    session = numbered(0)
    turn = take_turn(session, [user("a")], "1")
    async with asyncio.timeout(PATIENCE_S), SQLiteStore(tmp_path / "s.db") as store:
        await store.create(session)
        await store.commit(session.session_id, turn)
        store.mark_delivered(session.session_id, turn.index)
        while not (await store.read(session.session_id)).turns[0].delivered:
            await asyncio.sleep(0.01)


async def test_a_server_whose_store_has_ended_says_so(tmp_path: Path) -> None:
    """Turns and new sessions are refused with `store_failed` at once, and `/health` is 503."""
    async with session_on(store=tmp_path / "s.db") as (client, session):
        before = await client.http.get("/health")
        end_the_writer()
        chats = await asyncio.gather(*(client.chat(session, [user(text)]) for text in "abc"))
        creation = await client.http.post("/sessions", json={})
        health = await client.http.get("/health")

    assert (before.status_code, before.json()["store"]) == (200, {"ready": True, "detail": "", "quarantined": 0})
    refusals = [*chats, creation]
    assert [(each.status_code, each.json()["error"]["code"]) for each in refusals] == [(503, "store_failed")] * 4
    assert [each.headers.get("x-should-retry") for each in refusals] == [None] * 4  # as the words say: ask again
    assert (health.status_code, health.json()["status"]) == (503, "store_failed")
    assert "restart" in health.json()["store"]["detail"]


async def test_a_server_without_descriptors_left_refuses_to_start_by_name(tmp_path: Path) -> None:
    """One typed error that says which file and why; a server that has its store needs no further ones to write."""
    session = numbered(0)
    turn = take_turn(session, [user("a")], "1")
    async with SQLiteStore(tmp_path / "s.db") as store:
        await store.create(session)
        with no_descriptors():
            await store.commit(session.session_id, turn)
            with pytest.raises(StoreError, match=r"other\.db: it cannot be claimed: Too many open files"):
                await SQLiteStore(tmp_path / "other.db").__aenter__()

    assert list(read_file(tmp_path / "s.db")[session.session_id].turns) == [0]
