"""Sessions in a SQLite file (WAL), written by one thread that commits in groups.

Whatever waits when the thread comes round is committed together, so a busy server pays one commit for many turns and
an idle one pays nothing for the grouping. WAL with `synchronous=NORMAL` survives `kill -9` of the process (I9); a power
cut may lose the last commits but never the file. A write that fails fails everybody who waited for its group, and
nothing of the group is kept.
"""

import asyncio
import errno
import os
import queue
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from harness.errors import StoreError, StoreFull
from harness.sessions.lifecycle import Phase
from harness.sessions.session import Session
from harness.store import rows
from harness.store.claim import claim
from harness.types import Turn

_LARGEST_GROUP = 512
_BUSY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Write:
    """Statements for the writer thread, all or none; `done` is None when nobody waits for them."""

    statements: Sequence[rows.Statement]
    done: asyncio.Future[None] | None


class SQLiteStore:
    """A `SessionStore` in one file, which it has to itself; entering it raises `StoreError` when it cannot."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_groups, name="session-store", daemon=True)

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            self._claim = stack.enter_context(claim(self._path))
            self._connection = _open(self._path)
            stack.pop_all()
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writes.put(None)
        await asyncio.to_thread(self._thread.join)
        self._connection.close()
        self._claim.close()

    async def create(self, session: Session) -> None:
        """Keep a session that has no turns yet."""
        await self._write((rows.INSERT_SESSION, rows.session_row(session)))

    async def take_over(self, session: Session, previous: Session) -> None:
        """Keep a session that has the turns of `previous`, and `previous` as closed: both or neither."""
        await self._write(
            (rows.INSERT_SESSION, rows.session_row(session)),
            *((rows.INSERT_TURN, rows.turn_row(session.session_id, turn)) for turn in session.turns),
            (rows.UPDATE_PHASE, (str(Phase.CLOSED), previous.session_id)),
        )

    async def commit(self, session_id: str, turn: Turn) -> None:
        """Keep the outcome of a turn, in the place of an earlier one of the same turn."""
        await self._write((rows.INSERT_TURN, rows.turn_row(session_id, turn)))

    async def keep_scores(self, session_id: str, turn: Turn) -> None:
        """Keep the proximal columns of a turn that is kept already; nothing else of it is touched."""
        await self._write((rows.UPDATE_SCORES, rows.scores_row(session_id, turn)))

    async def set_phase(self, session: Session) -> None:
        """Keep the phase of a session."""
        await self._write((rows.UPDATE_PHASE, (str(session.phase), session.session_id)))

    def mark_delivered(self, session_id: str, index: int, *, delivered: bool = True) -> None:
        """Note whether a turn's answer was handed over; does not wait for the disk."""
        self._writes.put(_Write([(rows.UPDATE_DELIVERED, (int(delivered), session_id, index))], None))

    async def load(self) -> list[Session]:
        """The sessions that are not closed, with their turns."""
        return await asyncio.to_thread(read_sessions, self._path, rows.SELECT_UNCLOSED_SESSIONS)

    async def _write(self, *statements: rows.Statement) -> None:
        done = self._loop.create_future()
        self._writes.put(_Write(statements, done))
        await done

    def _write_groups(self) -> None:
        """Body of the writer thread: commit group after group until told to stop."""
        for group in self._groups():
            error = self._commit(group)
            waiting = [write.done for write in group if write.done is not None]
            if waiting:
                self._loop.call_soon_threadsafe(_settle, waiting, error)

    def _groups(self) -> Iterator[list[_Write]]:
        while (first := self._writes.get()) is not None:
            group = [first]
            while len(group) < _LARGEST_GROUP and not self._writes.empty():
                write = self._writes.get()
                if write is None:
                    yield group
                    return
                group.append(write)
            yield group

    def _commit(self, group: list[_Write]) -> StoreError | None:
        try:
            with self._connection:
                for statement, parameters in chain.from_iterable(write.statements for write in group):
                    self._connection.execute(statement, parameters)
        except (sqlite3.Error, ValueError, OverflowError) as error:  # the latter two: a value that SQLite cannot hold
            return _store_error(self._path, error)
        return None


def read_sessions(path: Path, selection: str = rows.SELECT_SESSIONS) -> list[Session]:
    """The sessions in a store, closed ones included, for tools that look at a run. Raises `StoreError`."""
    if not path.is_file():
        raise StoreError(f"expected a session store, found no file {path}")
    try:
        with closing(_connect(path)) as connection:
            _check_version(path, connection)
            return [_read_session(path, connection, row) for row in connection.execute(selection).fetchall()]
    except sqlite3.Error as error:
        raise _store_error(path, error) from error


def _read_session(path: Path, connection: sqlite3.Connection, row: sqlite3.Row) -> Session:
    try:
        session = rows.session_from_row(row)
        for turn in connection.execute(rows.SELECT_TURNS, (session.session_id,)):
            session.restore(rows.turn_from_row(turn))
    except (LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise StoreError(f"{path}: session {row['session_id']} is damaged: {type(error).__name__} {error}") from error
    return session


def _open(path: Path) -> sqlite3.Connection:
    """A connection for the writer thread; the file and its tables are created when missing."""
    connection = None
    try:
        connection = _connect(path)
        if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            connection.executescript(f"BEGIN; {rows.SCHEMA} COMMIT;")
        _check_version(path, connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
    except (sqlite3.Error, StoreError) as error:
        if connection is not None:
            connection.close()
        raise error if isinstance(error, StoreError) else _store_error(path, error) from error
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    return connection


def _check_version(path: Path, connection: sqlite3.Connection) -> None:
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'sessions'").fetchone():
        raise StoreError(f"{path} is a database of something else, not a session store; use a new file")
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found != rows.SCHEMA_VERSION:
        raise StoreError(f"{path} has store version {found}, this harness reads {rows.SCHEMA_VERSION}; use a new file")


def _settle(waiting: list[asyncio.Future[None]], error: StoreError | None) -> None:
    """Wake up whoever waited for a group; those that were cancelled meanwhile are left alone."""
    for done in waiting:
        if done.done():
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def _store_error(path: Path, error: Exception) -> StoreError:
    if "disk is full" in str(error) or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return StoreFull(f"{os.strerror(errno.ENOSPC)}: {path}; free some space, then resume the run")
    return StoreError(f"{path}: {error}")
