"""How far training has come, in the database of the run: the one truth that a killed run goes on from.

A step is planned, collected once everything in it is known, and committed once its update of the weights cannot be lost
any more: the learner's state is on the disk by then. Steps are committed in order, so the next step is the number of
committed ones. What a dead process had not committed has not happened, and opening the table undoes it. Rollouts that
had ended and were kept are still there (`recall`): weights are served only once the step that made them is committed,
so these were sampled by policies that the run goes on from.

One trainer at a time has the table, by a lock that ends with its process. Methods block, raise `StoreError`
(`StoreFull`), and may be called from any thread.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from harness.collector.record.kept_rollout import from_bytes, to_bytes
from harness.collector.record.step_record import StepRecord
from harness.collector.record.step_sessions import (
    claim_rollouts,
    count_left,
    count_unclaimed,
    forget_rollouts,
    make_room,
    place_of,
    sessions_to_forget,
)
from harness.collector.record.step_tables import TABLES, Position, has_steps, read_position
from harness.collector.rollout_index import RolloutIndex, ScoredRollout
from harness.errors import StepError, StoreError
from harness.machine.clock import Clock
from harness.machine.disk import disk_failures
from harness.machine.locks import try_lock
from harness.sessions.ledger import Ledger, total

_BUSY_TIMEOUT_S = 10.0
_SESSIONS_AT_ONCE = 16  # sessions that are forgotten together: a turn that waits for the disk waits for no more
_PAGES_AT_ONCE = 256  # pages that the file shrinks by at once, for the same reason

_UNDO = """
UPDATE step_rollouts SET step = NULL WHERE step IN (SELECT step FROM steps WHERE state != 'committed');
DELETE FROM steps WHERE state != 'committed'"""
_PLAN = "INSERT INTO steps (step, state, planned_at) VALUES (?, 'planned', ?)"
_STEP = "SELECT state, planned_at, record FROM steps WHERE step = ?"
_COLLECT = "UPDATE steps SET state = 'collected', record = ? WHERE step = ?"
_TRAIN = "INSERT INTO trained_groups VALUES (?, ?, ?)"
_COMMIT = "UPDATE steps SET state = 'committed', run_ledger = ? WHERE step = ?"
_KEEP = (
    "INSERT INTO step_rollouts VALUES (?1, ?2, ?3, ?4, ?5, NULL, ?6, ?7)"
    " ON CONFLICT (session_id) DO UPDATE SET generated = ?6, rollout = ?7 WHERE step IS NULL"
)
_RECALL = (
    "SELECT rollout FROM step_rollouts WHERE begun_in = ? AND number = ? AND member = ? AND attempt = ?"
    " AND step IS NULL AND rollout IS NOT NULL"
)
_FORGET = "DELETE FROM steps WHERE step < ?"


class StepTable:
    """The steps of the run whose database is `path`; a context manager.

    `keep_steps` committed steps stay, with their rollouts and sessions; None keeps all. Entering it raises `StoreError`
    when another trainer has it.
    """

    def __init__(self, path: Path, keep_steps: int | None = 2, clock: Clock = time.time) -> None:
        if keep_steps is not None and keep_steps < 1:
            raise StepError(f"keep_steps is at least 1, this is {keep_steps}: a run goes on from its last step")
        self._path = path
        self._keep_steps = keep_steps
        self._clock = clock
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        with ExitStack() as stack, disk_failures(self._path):
            claim = stack.enter_context(self._path.with_name(f"{self._path.name}-steps").open("ab"))
            if not try_lock(claim):
                raise StoreError(f"{self._path}: another trainer is at work with it; wait for it or stop it")
            if not self._path.exists():
                self._path.touch(mode=0o600)  # it will be the session store too, and has the keys of sessions then
            connection = sqlite3.connect(
                self._path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._connection = stack.enter_context(closing(connection))
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # counts in a new database only
            connection.execute("PRAGMA journal_mode = WAL")
            if has_steps(connection):
                with self._writing():
                    for statement in _UNDO.split(";"):
                        connection.execute(statement)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:  # a thread may be at work whose caller was cancelled
            self._resources.close()

    @property
    def position(self) -> Position:
        """How far the run has come."""
        with self._reading() as connection:
            return read_position(connection)

    def plan(self, step: int) -> None:
        """The first rollout of `step` is about to begin. The session store has been opened by then.

        A step that failed before it was collected is planned already, and stays as it was; one that has been collected
        cannot be planned again.
        """
        with self._writing() as connection:
            for statement in TABLES:
                connection.execute(statement)
            row = connection.execute(_STEP, (step,)).fetchone()
            if row is None or row[0] != "planned":
                connection.execute(_PLAN, (step, self._clock()))

    def keep(self, scored: ScoredRollout) -> None:
        """Keep a rollout that has ended, as it is now, for the step that is to come.

        In the place of an earlier form of it, and of another rollout at its index. Nothing is kept of one without a
        session.
        """
        session_id = scored.rollout.session_id
        if session_id is None:
            return
        blob, generated = to_bytes(scored), int(scored.rollout.session["ledger"]["generated"])
        with self._writing() as connection:
            make_room(connection, scored.index, session_id)
            connection.execute(_KEEP, (session_id, *place_of(scored.index), generated, blob))

    def recall(self, index: RolloutIndex) -> ScoredRollout | None:
        """The rollout that was kept at `index` and is in no step yet, if there is one."""
        with self._reading() as connection:
            row = connection.execute(_RECALL, place_of(index)).fetchone() if has_steps(connection) else None
        return None if row is None else from_bytes(row[0])

    def collect(self, record: StepRecord) -> StepRecord:
        """All of a planned step is known, and its rollouts are its own; returns the record with the whole ledger.

        That has the tokens, too, of which nobody had told the step. Raises `LedgerImbalance` when the store holds less
        of a session than its ledger says.
        """
        with self._writing(durably=True) as connection:
            state, planned_at, _ = self._find(connection, record.step)
            if state != "planned":
                raise StoreError(f"{self._path}: expected step {record.step} to be planned, it is {state}")
            claim_rollouts(connection, record)
            ledger = total([record.ledger, count_unclaimed(connection, record, planned_at)])
            ledger.check(f"step {record.step}")
            record = msgspec.structs.replace(record, ledger=ledger)
            connection.execute(_COLLECT, (record.to_line().decode(), record.step))
        return record

    def commit(self, step: int) -> Ledger:
        """The update of `step` cannot be lost any more, and the step has happened; returns the ledger of the run.

        Raises `StoreError` unless it is the next step, and collected, and no group of it was trained before.
        """
        with self._writing(durably=True) as connection:
            position = read_position(connection)
            if step != position.step:
                raise StoreError(f"{self._path}: expected step {position.step} to be committed next, got {step}")
            state, _, row = self._find(connection, step)
            if row is None:
                raise StoreError(f"{self._path}: expected step {step} to be collected, it is {state}")
            record = StepRecord.read(row)
            ledger = total([position.ledger, record.ledger])
            connection.executemany(_TRAIN, [(*group, step) for group in record.groups])
            connection.execute(_COMMIT, (msgspec.json.encode(ledger).decode(), step))
        return ledger

    def forget(self) -> None:
        """Give back what committed steps beyond `keep_steps` hold: their rollouts, and their sessions in the store.

        A few sessions at a time; a process that dies between two leaves the rest to the next call. What comes next
        fills the room; where more than half of the file is empty, it shrinks.
        """
        if self._keep_steps is None:
            return
        with self._reading() as connection:
            first_kept = read_position(connection).step - self._keep_steps
            old = sessions_to_forget(connection, first_kept) if has_steps(connection) else []
        for start in range(0, len(old), _SESSIONS_AT_ONCE):
            with self._writing() as connection:
                forget_rollouts(connection, old[start : start + _SESSIONS_AT_ONCE])
        if first_kept > 0:
            with self._writing() as connection:
                connection.execute(_FORGET, (first_kept,))
        free, was_free = self._count_free(), None
        while free > 0 and free != was_free:
            with self._reading() as connection:
                connection.execute(f"PRAGMA incremental_vacuum({min(free, _PAGES_AT_ONCE)})").fetchall()
            free, was_free = self._count_free(), free

    def close_books(self) -> Ledger:
        """The ledger of the run, were it to end now: whatever no committed step stands for is `interrupted`.

        What came to a session of a committed step behind its last count is `undelivered`. Raises `LedgerImbalance`.
        """
        with self._reading() as connection:
            position = read_position(connection)
            left = count_left(connection, position.step) if has_steps(connection) else Ledger()
            ledger = total([position.ledger, left])
        ledger.check("run")
        return ledger

    def _count_free(self) -> int:
        """How many pages of the file are empty beyond as many as hold something."""
        with self._reading() as connection:
            [(pages,)], [(empty,)] = (
                connection.execute(f"PRAGMA {name}").fetchall() for name in ("page_count", "freelist_count")
            )
        return int(2 * empty - pages)

    def _find(self, connection: sqlite3.Connection, step: int) -> tuple[str, float, str | None]:
        row: tuple[str, float, str | None] | None = None
        if has_steps(connection):
            row = connection.execute(_STEP, (step,)).fetchone()
        if row is None:
            raise StoreError(f"{self._path}: there is no step {step}: it was not planned, or has been forgotten")
        return row

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, disk_failures(self._path):
            yield self._connection

    @contextmanager
    def _writing(self, *, durably: bool = False) -> Iterator[sqlite3.Connection]:
        """One transaction, all or nothing; `durably`: it survives a power cut, and so does what came before it."""
        with self._reading() as connection:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durably else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # a full disk has rolled back by itself
                    connection.execute("ROLLBACK")
                raise
