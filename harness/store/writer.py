"""The thread that writes a SQLite database: whatever waits when it comes round is committed together.

A busy server pays one commit for many turns, an idle one pays nothing for the grouping. Notes, for which nobody waits,
go with the next write but those of turns, or after a moment: alone each would wake the thread for a commit of its own.

Each call of SQLite gives the interpreter away and has to get it back from the event loop, which costs more than what
most of them do. So a group of one statement is committed by itself, in the fewest of them.

Of a group that fails nothing is kept. When the disk failed, everybody who waited for the group gets the error; anything
else (no memory, a value that SQLite cannot hold) is the fault of one write, so each is tried alone. Should the thread
end all the same, everybody who waits and everybody who comes later gets a `StoreError`: nobody waits for a thread that
is gone.

All who wait are known to the event loop and not only to the queue, because a thread that dies may take with it what it
had just taken out of the queue.
"""

import asyncio
import errno
import os
import queue
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import SessionExists, StoreError, StoreFull
from harness.machine.log import get_logger

log = get_logger(__name__)

_LARGEST_GROUP = 512
_NOTES_S = 0.1  # how long a note waits for others

Statement = tuple[str, Sequence[Any]]
"""SQL and its parameters."""


class _Stop(NamedTuple):
    """The last entry of the queue."""


@dataclass(frozen=True, slots=True)
class _Write:
    """Statements, all or none; `done` is None when nobody waits for them."""

    statements: Sequence[Statement]
    changes: int | None
    """How many rows they must change; None for any number."""
    done: asyncio.Future[None] | None


class GroupWriter:
    """Commits on `connection`, the database at `path`, for coroutines of the running loop."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Sequence[_Write] | _Stop] = queue.SimpleQueue()
        self._notes: list[_Write] = []
        self._notes_timer: asyncio.TimerHandle | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._ended: str | None = None
        self._thread = threading.Thread(target=self._run, name="session-store", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """Why nothing can be written any more; None while the thread runs."""
        return self._ended

    async def write(self, *statements: Statement, changes: int | None = None) -> None:
        """Return when `statements` are on the disk. Raises `StoreError`; none of them is kept then.

        That is so too when they change another number of rows than `changes`: the store has not what they are about.
        """
        self._hand_over_notes()
        await self._write(statements, changes)

    async def insert(self, statement: Statement) -> None:
        """The same for a row that no note is about: notes wait on."""
        await self._write((statement,), None)

    def note(self, *statements: Statement) -> None:
        """Write `statements` with the next `write`, or soon; nobody learns whether that worked."""
        self._notes.append(_Write(statements, None, None))
        if self._notes_timer is None:
            self._notes_timer = self._loop.call_later(_NOTES_S, self._hand_over_notes)

    async def stop(self) -> None:
        """Write what is queued and end the thread."""
        self._hand_over_notes()
        self._queue.put(_Stop())
        await asyncio.to_thread(self._thread.join)

    async def _write(self, statements: Sequence[Statement], changes: int | None) -> None:
        if self._ended is not None:
            raise StoreError(self._ended)
        done = self._loop.create_future()
        self._waiting.add(done)
        self._queue.put([_Write(statements, changes, done)])
        await done

    def _hand_over_notes(self) -> None:
        """Give the notes so far to the thread."""
        if self._notes_timer is not None:
            self._notes_timer.cancel()
            self._notes_timer = None
        if self._notes:
            notes, self._notes = self._notes, []
            self._queue.put(notes)

    def _run(self) -> None:
        """Body of the thread: commit group after group until told to stop."""
        problem = f"{self._path}: the store has been left"
        try:
            for group in self._groups():
                error = self._commit(group)
                if error is None or isinstance(error, sqlite3.OperationalError):
                    self._answer(group, error)
                else:
                    for write in group:
                        self._answer([write], error if len(group) == 1 else self._commit([write]))
        except BaseException as error:
            problem = f"{self._path}: the thread that writes it has ended ({type(error).__name__} {error}); restart"
            log.critical("store_writer_ended", store=str(self._path), exc_info=error)
        finally:
            with suppress(RuntimeError):  # the loop is closed: nobody can wait on it
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
            if self._connection.in_transaction:  # a rollback failed, for want of memory perhaps: nothing may join it
                self._connection.rollback()
            match group:
                case [_Write(statements=[statement], changes=None)]:  # all or none by itself
                    self._connection.execute(*statement)
                case _:
                    self._execute_together(group)
        # SQLITE_NOMEM is a MemoryError, a value that SQLite cannot hold a ValueError or an OverflowError. Whatever it
        # is, somebody waits for an answer, and those of the next group deserve an attempt of their own.
        except BaseException as error:  # noqa: BLE001  # whoever waits for the write gets it
            return error
        return None

    def _execute_together(self, group: Sequence[_Write]) -> None:
        self._connection.execute("BEGIN")
        try:
            for write in group:
                self._execute(write)
            self._connection.execute("COMMIT")
        except BaseException:
            self._connection.rollback()
            raise

    def _execute(self, write: _Write) -> None:
        before = self._connection.total_changes
        for statement, parameters in write.statements:
            self._connection.execute(statement, parameters)
        changes = self._connection.total_changes - before
        if write.changes is not None and changes != write.changes:
            raise sqlite3.IntegrityError(f"expected {write.changes} rows to change, {changes} did")

    def _answer(self, group: Sequence[_Write], error: BaseException | None) -> None:
        waiting = [write.done for write in group if write.done is not None]
        if waiting:
            answer = None if error is None else store_error(self._path, error)
            self._loop.call_soon_threadsafe(self._wake, waiting, answer)

    def _end(self, problem: str) -> None:
        self._ended = problem
        self._wake(list(self._waiting), StoreError(problem))

    def _wake(self, waiting: Sequence[asyncio.Future[None]], error: StoreError | None) -> None:
        """Wake up whoever waited for a group; those that were cancelled meanwhile are left alone."""
        self._waiting.difference_update(waiting)
        for done in waiting:
            if done.done():
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)


def store_error(path: Path, error: BaseException) -> StoreError:
    """The error that a caller gets for `error`, raised in the use of the database at `path`."""
    if "disk is full" in str(error) or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return StoreFull(f"{os.strerror(errno.ENOSPC)}: {path}; free some space, then resume the run")
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY:
        return SessionExists(f"{path}: {error}")
    if isinstance(error, MemoryError):
        return StoreError(f"{path}: out of memory; make bodies smaller or give the server more")
    return StoreError(f"{path}: {error}")
