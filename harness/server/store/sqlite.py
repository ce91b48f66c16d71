"""Sessions in a SQLite file (WAL), written by one thread that commits in groups (`writer`).

WAL with `synchronous=NORMAL` survives `kill -9` of the process (I9). A power cut may lose the last commits but never
the file. Each reader uses its own connection in its own thread.
"""

import asyncio
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec
from msgspec import structs

from harness.errors import StoreError
from harness.machine.clock import Clock
from harness.server.store import rows
from harness.server.store.base import (
    DamagedSession,
    LoadedSessions,
    MemoryStore,
    SessionStore,
    StoredRecord,
    Take,
    as_read,
)
from harness.server.store.file_access import claim, only_reading
from harness.server.store.schema import bring_up_to_date, read_as_today
from harness.server.store.writer import GroupWriter, store_error
from harness.sessions.gate import Hold
from harness.sessions.hold_times import HoldTime
from harness.sessions.ledger import Unknown
from harness.sessions.lifecycle import CloseReason, Phase, RolloutEnd
from harness.sessions.paging import SessionOutline, SessionStub
from harness.sessions.session import Session
from harness.token_rows import RecordedRows
from harness.types import TeacherScores, Turn

_BUSY_TIMEOUT_S = 10.0


class SQLiteStore:
    """A `SessionStore` in one file, with exclusive access."""

    def __init__(self, path: Path, *, clock: Clock = time.time) -> None:
        self._path = path
        self._clock = clock
        self.tokenizer = rows.TokenizerName()

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            self._claim = stack.enter_context(claim(self._path))
            self._connection = stack.enter_context(closing(_open(self._path)))
            self._writer = GroupWriter(self._path, self._connection)
            stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._writer.stop()
        self._connection.close()
        self._claim.close()

    @property
    def reads_back(self) -> bool:
        return True

    @property
    def problem(self) -> str | None:
        return self._writer.problem

    async def create(self, session: Session) -> None:
        statements: list[rows.Statement] = [(rows.INSERT_SESSION, rows.session_row(session, self.tokenizer))]
        for turn in session.turns:
            statements += _insert_turn(session.session_id, turn)
        if session.records_rows and session.config.inherits is not None:
            statements.append((rows.COPY_ROWS, (session.session_id, session.config.inherits.session_id)))
        await self._writer.write(*statements)

    async def take_over(self, session: Session, previous: Session) -> None:
        statements = [
            (rows.INSERT_SESSION, rows.session_row(session, self.tokenizer)),
            *(
                (
                    rows.MOVE_TURN,
                    (session.session_id, str(turn.end), int(turn.delivered), previous.session_id, turn.index),
                )
                for turn in session.turns
            ),
            *(
                (rows.MOVE_ROWS, (session.session_id, previous.session_id, turn.index))
                for turn in session.turns
                if session.has_rows(turn)
            ),
            (rows.UPDATE_PHASE, (str(Phase.CLOSED), self._clock(), str(CloseReason.TAKEN_OVER), previous.session_id)),
        ]
        await self._writer.write(*statements, changes=len(statements))
        if any(turn.teachers for turn in session.turns):  # a note: what it loses is scored again
            self._writer.note((rows.MOVE_TEACHER_SCORES, (session.session_id, previous.session_id, session.session_id)))

    async def commit(self, session_id: str, turn: Turn) -> None:
        await self._writer.insert(*_insert_turn(session_id, turn))

    async def keep_scores(self, session_id: str, turns: Sequence[Turn]) -> None:
        await self._writer.write(*((rows.UPDATE_SCORES, rows.scores_row(session_id, turn)) for turn in turns))

    async def keep_teaching(self, session_id: str, name: str, turns: Sequence[Turn]) -> None:
        await self._writer.write(*(_insert_teaching(session_id, turn, name) for turn in turns))

    async def set_phase(self, session: Session | SessionStub) -> None:
        await self._writer.write((rows.UPDATE_PHASE, rows.phase_row(session, self._clock())))

    async def forget_closed(self, older_than_s: float, most: int) -> int:
        until = self._clock() - older_than_s

        def find() -> list[str]:
            with reading(self._path) as connection:
                return [row["session_id"] for row in connection.execute(rows.SELECT_CLOSED_BEFORE, (until, most))]

        closed = await asyncio.to_thread(find)
        if closed:
            await self._writer.write(*((sql, (each,)) for each in closed for sql in rows.DELETE_SESSION))
        return len(closed)

    def mark_delivered(self, session_id: str, index: int, *, delivered: bool = True) -> None:
        self._writer.note((rows.UPDATE_DELIVERED, (int(delivered), session_id, index)))

    def mark_end(self, session_id: str, end: RolloutEnd) -> None:
        self._writer.note((rows.UPDATE_END, (*end, session_id)))

    async def load(self, take: Take = as_read) -> LoadedSessions:
        def read() -> LoadedSessions:
            sessions: list[Session | SessionStub] = []
            damaged: list[DamagedSession] = []
            with reading(self._path) as connection:
                for row in connection.execute(rows.SELECT_UNCLOSED_SESSIONS).fetchall():
                    try:
                        sessions.append(take(_read_session(connection, row)))
                    except _Damaged as error:
                        reason = f"{type(error.__cause__).__name__} {error.__cause__}"
                        damaged.append(DamagedSession(str(row["session_id"]), str(row["api_key"]), reason))
            return LoadedSessions(sessions, damaged)

        return await asyncio.to_thread(read)

    async def outline(self, session_id: str) -> SessionOutline | None:
        def read() -> SessionOutline | None:
            with reading(self._path) as connection:
                connection.execute("BEGIN")  # one snapshot for both queries
                row = connection.execute(rows.SELECT_PHASE, (session_id,)).fetchone()
                found = connection.execute(rows.SELECT_OUTLINES, (session_id,))
                return row and SessionOutline(row["phase"], tuple(map(rows.outline_from_row, found)))

        try:
            return await asyncio.to_thread(read)
        except (LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise StoreError(f"{self._path}: session {session_id} is damaged: {error}") from error

    async def read(self, session_id: str) -> Session:
        return await asyncio.to_thread(read_session, self._path, session_id)

    async def read_record(self, session_id: str) -> StoredRecord:
        return await asyncio.to_thread(read_record, self._path, session_id)

    async def find_heir(self, session_id: str) -> str | None:
        def read() -> str | None:
            with reading(self._path) as connection:
                row = connection.execute(rows.SELECT_HEIR, (session_id,)).fetchone()
            return None if row is None else str(row["session_id"])

        return await asyncio.to_thread(read)

    async def load_rows(self, session_id: str) -> dict[int, RecordedRows]:
        return await asyncio.to_thread(read_rows, self._path, session_id)

    async def keep_hold(self, hold: Hold) -> None:
        values = (hold.holder, str(hold.kind), hold.until, int(hold.engines), hold.work)
        await self._writer.write((rows.KEEP_HOLD, values))

    async def drop_hold(self, holder: str) -> None:
        await self._writer.write((rows.DROP_HOLD, (holder,)))

    async def keep_label(self, label: str, number: int) -> None:
        await self._writer.write((rows.KEEP_LABEL, (label, number)))

    async def load_labels(self) -> dict[str, int]:
        def read() -> dict[str, int]:
            with reading(self._path) as connection:
                return {row["label"]: row["number"] for row in connection.execute(rows.SELECT_LABELS)}

        return await asyncio.to_thread(read)

    async def load_holds(self) -> list[Hold]:
        """Return the stored holds, without unreadable ones."""

        def read() -> list[sqlite3.Row]:
            with reading(self._path) as connection:
                return connection.execute(rows.SELECT_HOLDS).fetchall()

        holds: list[Hold] = []
        for row in await asyncio.to_thread(read):
            # A damaged row must not keep the server from starting. Its hold would have expired anyway.
            with suppress(ValueError, TypeError):
                holds.append(rows.hold_from_row(row))
        return holds

    async def load_hold_times(self, most: int) -> list[HoldTime]:
        """Return the times of the last holds, without unreadable ones."""

        def read() -> list[sqlite3.Row]:
            with reading(self._path) as connection:
                return connection.execute(rows.SELECT_LAST_HOLD_TIMES, (most,)).fetchall()

        times: list[HoldTime] = []
        for row in await asyncio.to_thread(read):
            with suppress(ValueError, TypeError):  # as with holds
                times.append(rows.hold_time_from_row(row))
        return times


def read_session(path: Path, session_id: str) -> Session:
    """Load one session of a store. Raises `StoreError`."""
    return read_record(path, session_id).session


def read_record(path: Path, session_id: str) -> StoredRecord:
    """Load one session of a store, with its tokenizer's name. Raises `StoreError`."""
    with reading(path) as connection:
        row = connection.execute(rows.SELECT_SESSION, (session_id,)).fetchone()
        if row is None:
            raise StoreError(f"{path}: no session {session_id}")
        tokenizer = rows.TokenizerName(row["tokenizer"], row["tokenizer_digest"])
        return StoredRecord(_read_whole(path, connection, row), tokenizer)


def read_rows(path: Path, session_id: str) -> dict[int, RecordedRows]:
    """Load the rows of a session's turns, by turn. Raises `StoreError`."""
    try:
        with reading(path) as connection:
            return _read_rows(connection, rows.SELECT_ROWS, session_id)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise StoreError(f"{path}: the rows of session {session_id} are damaged: {error}") from error


def list_sessions(path: Path) -> dict[str, rows.StoredLine]:
    """Summarize each session; SQLite counts the tokens. Raises `StoreError`."""
    with reading(path) as connection:
        return {row["session_id"]: rows.line_from_row(row) for row in connection.execute(rows.LIST_SESSIONS)}


def count_generated(path: Path) -> dict[str, int]:
    """Count the sampled tokens of each session, discarded ones included. Raises `StoreError`."""
    return {session_id: line.sampled for session_id, line in list_sessions(path).items()}


def count_unknown(path: Path) -> dict[str, Unknown]:
    """Count the requests without a reported end, by session. Raises `StoreError`."""
    with reading(path) as connection:
        found = connection.execute(rows.COUNT_UNKNOWN).fetchall()
        return {row["session_id"]: Unknown(row["requests"], row["tokens"]) for row in found}


def read_hold_times(path: Path) -> list[HoldTime]:
    """Return all hold times, in order; none for an older store. Raises `StoreError`."""
    with reading(path) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'hold_times'").fetchone():
            return []
        return [rows.hold_time_from_row(row) for row in connection.execute(rows.SELECT_HOLD_TIMES)]


def read_sessions(path: Path) -> list[Session]:
    """Load all sessions of a store, closed ones included. Raises `StoreError`."""
    with reading(path) as connection:
        found = connection.execute(rows.SELECT_SESSIONS).fetchall()
        return [_read_whole(path, connection, row) for row in found]


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Connect to the store at `path` without write access. Errors in the block become `StoreError`."""
    if not path.is_file():
        raise StoreError(f"expected a session store, found no file {path}")
    try:
        with only_reading(path) as connection:
            connection.row_factory = sqlite3.Row
            read_as_today(path, connection)
            yield connection
    except (sqlite3.Error, MemoryError, OSError) as error:
        raise store_error(path, error) from error


class _Damaged(Exception):
    """Invalid rows of a session; the cause names the problem."""


def _read_whole(path: Path, connection: sqlite3.Connection, row: sqlite3.Row) -> Session:
    try:
        return _read_session(connection, row)
    except _Damaged as damaged:
        raise StoreError(f"{path}: session {damaged} is damaged: {damaged.__cause__}") from damaged


def _read_session(connection: sqlite3.Connection, row: sqlite3.Row) -> Session:
    try:
        session = rows.session_from_row(row)
        going_on: dict[int, RecordedRows] = {}
        if session.records_rows:
            going_on = _read_rows(connection, rows.SELECT_ROWS_OF_ABORTED, session.session_id)
        teachers = _read_teaching(connection, session.session_id) if session.config.teachers else {}
        for each in connection.execute(rows.SELECT_TURNS, (session.session_id,)):
            turn = rows.turn_from_row(each)
            if scored := teachers.get(turn.index):  # an outcome that was replaced leaves scores of another length
                fitting = {name: each for name, each in scored.items() if each.logprobs.size == turn.output_ids.size}
                turn = structs.replace(turn, teachers=fitting)
            if (kept := going_on.get(turn.index)) is not None:
                turn = structs.replace(turn, rows=kept.experts, masks=kept.masks)
            session.restore(turn)
    except (LookupError, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise _Damaged(row["session_id"]) from error
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CORRUPT:  # a damaged page; the extended codes name its kind
            raise
        raise _Damaged(row["session_id"]) from error
    return session


def _insert_turn(session_id: str, turn: Turn) -> list[rows.Statement]:
    statements: list[rows.Statement] = [(rows.INSERT_TURN, rows.turn_row(session_id, turn))]
    if turn.rows is not None or turn.masks is not None:
        blob = RecordedRows(turn.rows, turn.masks).to_bytes()
        statements.append((rows.INSERT_ROWS, (session_id, turn.index, blob)))
    return statements + [_insert_teaching(session_id, turn, name) for name in turn.teachers]


def _insert_teaching(session_id: str, turn: Turn, name: str) -> rows.Statement:
    return rows.INSERT_TEACHER_SCORES, rows.teacher_scores_row(session_id, turn, name)


def _read_teaching(connection: sqlite3.Connection, session_id: str) -> dict[int, dict[str, TeacherScores]]:
    found: dict[int, dict[str, TeacherScores]] = {}
    for row in connection.execute(rows.SELECT_TEACHER_SCORES, (session_id,)):
        found.setdefault(row["turn"], {})[row["teacher"]] = rows.teacher_scores_from_row(row)
    return found


def _read_rows(connection: sqlite3.Connection, query: str, session_id: str) -> dict[int, RecordedRows]:
    found = connection.execute(query, (session_id,))
    return {turn: RecordedRows.from_bytes(blob) for turn, blob in found}


def _open(path: Path) -> sqlite3.Connection:
    connection = None
    try:
        if not path.exists():
            path.touch(mode=0o600)  # it holds session keys; SQLite gives its log the mode of the file
        connection = sqlite3.connect(
            path.absolute(), timeout=_BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
        )
        bring_up_to_date(path, connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
    except (sqlite3.Error, StoreError, OSError) as error:
        if connection is not None:
            connection.close()
        raise error if isinstance(error, StoreError) else store_error(path, error) from error
    return connection


def open_store(where: str | Path, clock: Clock = time.time) -> SessionStore:
    """Return a SQLite store for a path, or a `MemoryStore` for `"memory"`. Enter it before use."""
    return MemoryStore() if where == "memory" else SQLiteStore(Path(where), clock=clock)
