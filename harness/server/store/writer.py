"""The thread that writes a SQLite database, committing all queued writes together.

A busy server pays one commit for many turns; an idle one pays nothing for grouping. A failed group keeps nothing. If
the thread dies, all present and later callers get a `StoreError`.
"""

import asyncio
import errno
import os
import queue
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import SessionExists, StoreError, StoreFull
from harness.machine.log import get_logger

log = get_logger(__name__)

_LARGEST_GROUP = 512
_NOTES_S = 0.1  # longest wait of a note for other writes

Statement = tuple[str, Sequence[Any]]


class _Stop(NamedTuple):
    """Last entry of the queue."""


class _Write(NamedTuple):
    """Statements of one transaction; `done` is None for notes."""

    statements: Sequence[Statement]
    changes: int | None
    """Exact number of rows to change; None for any."""
    done: asyncio.Future[None] | None


class GroupWriter:
    """Commits the writes of the running loop's coroutines."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Sequence[_Write] | _Stop] = queue.SimpleQueue()
        # Notes have no waiter. They go with the next write that is not a turn, or after a moment: each alone would wake
        # the thread for its own commit.
        self._notes: list[_Write] = []
        self._notes_timer: asyncio.TimerHandle | None = None
        # A dying thread may lose writes that it took from the queue, so the loop tracks all waiters too.
        self._waiting: set[asyncio.Future[None]] = set()
        self.problem: str | None = None
        """Reason writes fail, or None while the thread runs."""
        self._thread = threading.Thread(target=self._run, name="session-store", daemon=True)
        self._thread.start()

    async def write(self, *statements: Statement, changes: int | None = None) -> None:
        """Return when `statements` are on disk. Raises `StoreError`, keeping none, unless `changes` rows changed."""
        self._hand_over_notes()
        await self.insert(*statements, changes=changes)

    async def insert(self, *statements: Statement, changes: int | None = None) -> None:
        """Write rows that no note refers to, so notes keep waiting."""
        if self.problem is not None:
            raise StoreError(self.problem)
        done = self._loop.create_future()
        self._waiting.add(done)
        self._queue.put([_Write(statements, changes, done)])
        await done

    def note(self, *statements: Statement) -> None:
        """Write `statements` with the next `write`, or soon. Failures are not reported."""
        self._notes.append(_Write(statements, None, None))
        if self._notes_timer is None:
            self._notes_timer = self._loop.call_later(_NOTES_S, self._hand_over_notes)

    async def stop(self) -> None:
        """Write the queued statements and end the thread."""
        self._hand_over_notes()
        self._queue.put(_Stop())
        await asyncio.to_thread(self._thread.join)

    def _hand_over_notes(self) -> None:
        if self._notes_timer is not None:
            self._notes_timer.cancel()
            self._notes_timer = None
        if self._notes:
            notes, self._notes = self._notes, []
            self._queue.put(notes)

    def _run(self) -> None:
        problem = f"{self._path}: the store is closed"
        try:
            for group in self._groups():
                error = self._commit(group)
                # If the disk failed, every waiter gets the error. Any other error (out of memory, a value that SQLite
                # cannot hold) is the fault of one write, so each is retried alone.
                if error is None or isinstance(error, sqlite3.OperationalError):
                    self._answer(group, error)
                else:
                    for write in group:
                        self._answer([write], error if len(group) == 1 else self._commit([write]))
        except BaseException as error:
            problem = f"{self._path}: the thread that writes it has ended ({type(error).__name__} {error}); restart"
            log.critical("store_writer_ended", store=str(self._path), exc_info=error)
        finally:
            with suppress(RuntimeError):  # the loop is closed, so no caller waits
                self._loop.call_soon_threadsafe(self._end, problem)

    def _groups(self) -> Iterator[list[_Write]]:
        while True:
            writes = self._queue.get()
            group: list[_Write] = []
            while not isinstance(writes, _Stop):
                group += writes
                if len(group) >= _LARGEST_GROUP or self._queue.empty():
                    break
                writes = self._queue.get()
            if group:
                yield group
            if isinstance(writes, _Stop):
                return

    def _commit(self, group: Sequence[_Write]) -> BaseException | None:
        try:
            if self._connection.in_transaction:  # a rollback failed, perhaps out of memory: no write may join it
                self._connection.rollback()
            # Each call releases the GIL and must get it back from the event loop, which usually costs more than the
            # call. So a single statement gets no explicit transaction. And `execute` releases it once more than
            # `executemany`, to learn the last row's id, and `execute("COMMIT")` twice more than `commit`.
            match group:
                case [_Write(statements=[(statement, parameters)], changes=None)]:  # atomic by itself
                    self._connection.executemany(statement, (parameters,))
                case _:
                    self._execute_together(group)
        # SQLite raises MemoryError for SQLITE_NOMEM, and ValueError or OverflowError for a value that it cannot hold.
        # Whatever the error is, a caller waits for it, and the next group deserves its own attempt.
        except BaseException as error:  # noqa: BLE001  # the waiting callers get it
            return error
        return None

    def _execute_together(self, group: Sequence[_Write]) -> None:
        self._connection.execute("BEGIN")
        try:
            for write in group:
                before = self._connection.total_changes
                for statement, parameters in write.statements:
                    self._connection.executemany(statement, (parameters,))
                changes = self._connection.total_changes - before
                if write.changes is not None and changes != write.changes:
                    raise sqlite3.IntegrityError(f"expected {write.changes} rows to change, {changes} did")
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
            raise

    def _answer(self, group: Sequence[_Write], error: BaseException | None) -> None:
        waiting = [write.done for write in group if write.done is not None]
        if waiting:
            answer = None if error is None else store_error(self._path, error)
            self._loop.call_soon_threadsafe(self._wake, waiting, answer)

    def _end(self, problem: str) -> None:
        self.problem = problem
        self._wake(list(self._waiting), StoreError(problem))

    def _wake(self, waiting: Sequence[asyncio.Future[None]], error: StoreError | None) -> None:
        self._waiting.difference_update(waiting)
        for done in waiting:
            # A cancelled waiter is done already.
            if done.done():
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)


def store_error(path: Path, error: BaseException) -> StoreError:
    if "disk is full" in str(error) or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return StoreFull(f"{os.strerror(errno.ENOSPC)}: {path}; free some space, then resume the run")
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY:
        return SessionExists(f"{path}: {error}")
    if isinstance(error, MemoryError):
        return StoreError(f"{path}: out of memory; make bodies smaller or give the server more")
    return StoreError(f"{path}: {error}")
