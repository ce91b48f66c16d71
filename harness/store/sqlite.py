"""Sessions in a SQLite file (WAL), written by one thread that commits in groups (`writer`).

WAL with `synchronous=NORMAL` survives `kill -9` of the process (I9); a power cut may lose the last commits but never
the file. Whoever only reads opens a connection of its own, in a thread of its own.
"""

import asyncio
import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from harness.errors import StoreError
from harness.sessions.lifecycle import Phase
from harness.sessions.session import Session
from harness.store import rows
from harness.store.claim import claim
from harness.store.writer import GroupWriter, store_error
from harness.types import Turn

_BUSY_TIMEOUT_S = 10.0


class SQLiteStore:
    """A `SessionStore` in one file, which it has to itself; entering it raises `StoreError` when it cannot."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            self._claim = stack.enter_context(claim(self._path))
            self._connection = stack.enter_context(closing(_open(self._path)))
            self._writer = GroupWriter(self._path, self._connection)
            stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._writer.stop()
        self._connection.close()
        self._claim.close()

    @property
    def problem(self) -> str | None:
        """Why nothing can be kept any more; None while all is well."""
        return self._writer.problem

    async def create(self, session: Session) -> None:
        """Keep a session that has no turns yet."""
        await self._writer.write((rows.INSERT_SESSION, rows.session_row(session)))

    async def take_over(self, session: Session, previous: Session) -> None:
        """Keep a session that has the turns of `previous`, and `previous` as closed: both or neither."""
        await self._writer.write(
            (rows.INSERT_SESSION, rows.session_row(session)),
            *((rows.INSERT_TURN, rows.turn_row(session.session_id, turn)) for turn in session.turns),
            (rows.UPDATE_PHASE, (str(Phase.CLOSED), previous.session_id)),
        )

    async def commit(self, session_id: str, turn: Turn) -> None:
        """Keep the outcome of a turn, in the place of an earlier one of the same turn."""
        await self._writer.write((rows.INSERT_TURN, rows.turn_row(session_id, turn)))

    async def keep_scores(self, session_id: str, turn: Turn) -> None:
        """Keep the proximal columns of a turn that is kept already; nothing else of it is touched."""
        await self._writer.write((rows.UPDATE_SCORES, rows.scores_row(session_id, turn)))

    async def set_phase(self, session: Session) -> None:
        """Keep the phase of a session."""
        await self._writer.write((rows.UPDATE_PHASE, (str(session.phase), session.session_id)))

    def mark_delivered(self, session_id: str, index: int, *, delivered: bool = True) -> None:
        """Note whether a turn's answer was handed over; does not wait for the disk."""
        self._writer.note((rows.UPDATE_DELIVERED, (int(delivered), session_id, index)))

    async def load(self) -> list[Session]:
        """The sessions that are not closed, with their turns."""
        return await asyncio.to_thread(read_sessions, self._path, rows.SELECT_UNCLOSED_SESSIONS)


def read_sessions(path: Path, selection: str = rows.SELECT_SESSIONS) -> list[Session]:
    """The sessions in a store, closed ones included, for tools that look at a run. Raises `StoreError`."""
    if not path.is_file():
        raise StoreError(f"expected a session store, found no file {path}")
    try:
        with closing(_connect(path)) as connection:
            _check_version(path, connection)
            return [_read_session(path, connection, row) for row in connection.execute(selection).fetchall()]
    except sqlite3.Error as error:
        raise store_error(path, error) from error


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
        raise error if isinstance(error, StoreError) else store_error(path, error) from error
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
