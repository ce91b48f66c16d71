"""A copy that SQLite makes of a store in use, as docs/keep-running.md says, is a store."""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from pathlib import Path

from harness.server.store.sqlite import SQLiteStore
from harness.sessions.session import Session
from tests.builders import new_session, take_turn, user


class _Writing:
    """A session whose turns are made durable one after another, until somebody says that it is enough."""

    def __init__(self, store: SQLiteStore) -> None:
        self.session = new_session()
        self.kept: list[Sequence[int]] = []
        self.is_enough = False
        self._store = store

    async def run(self) -> None:
        messages = [user("0")]
        for index in count(1):
            turn = take_turn(self.session, messages)
            await self._store.commit(self.session.session_id, turn)
            self.kept.append(turn.output_ids.tolist())
            messages = [*messages, turn.reply, user(str(index))]
            if self.is_enough:
                return

    async def wait_for_more(self, turns: int) -> None:
        wanted = len(self.kept) + turns
        while len(self.kept) < wanted:
            await asyncio.sleep(0)


def _copy(store: Path, copy: Path) -> None:
    with (
        closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)


async def _load(path: Path) -> Session:
    async with SQLiteStore(path) as store:
        loaded = await store.load()
    assert loaded.damaged == []
    [session] = loaded.sessions
    return session


async def test_a_copy_has_every_turn_that_was_durable_before_it(tmp_path: Path) -> None:
    """Taken in the middle of writing, it is whole, and the store continues beside it as if nobody had looked."""
    async with SQLiteStore(tmp_path / "sessions.db") as store:
        writing = _Writing(store)
        await store.create(writing.session)
        task = asyncio.create_task(writing.run())
        await writing.wait_for_more(5)
        before = len(writing.kept)
        await asyncio.to_thread(_copy, tmp_path / "sessions.db", tmp_path / "backup.db")
        await writing.wait_for_more(5)
        writing.is_enough = True
        await task

    copied = [turn.output_ids.tolist() for turn in (await _load(tmp_path / "backup.db")).turns]
    assert len(copied) >= before
    assert copied == writing.kept[: len(copied)]
    assert len((await _load(tmp_path / "sessions.db")).turns) == len(writing.kept) > len(copied)
