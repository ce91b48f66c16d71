"""Step table: progress of training in the run's database, from which a killed run continues.

A step is planned, collected once complete, and committed once its weight update is on disk, in order. Opening the table
undoes uncommitted steps of a dead process. Methods block, raise `StoreError` (`StoreFull`), and are thread-safe.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from harness.decoding import read_json
from harness.errors import StepError, StoreError
from harness.machine.clock import Clock
from harness.machine.disk import disk_failures, try_lock
from harness.server.store.file_access import only_reading
from harness.sessions.ledger import Ledger, total
from harness.training.collector.groups import RolloutIndex, ScoredRollout
from harness.training.collector.record.step_record import StepRecord, from_bytes, to_bytes
from harness.training.collector.record.step_sessions import (
    TABLES,
    claim_rollouts,
    count_left,
    count_unclaimed,
    forget_rollouts,
    has_steps,
    make_room,
    place_of,
    sessions_to_forget,
)

_BUSY_TIMEOUT_S = 10.0
_SESSIONS_AT_ONCE = 16  # sessions deleted per transaction: a turn waits for at most one
_PAGES_AT_ONCE = 256  # pages freed at once, for the same reason

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
# Kept rollouts of a dead process remain valid: weights are served only after the commit of the step that made them, so
# the run continues from the policies that sampled these rollouts.
_RECALL = (
    "SELECT rollout FROM step_rollouts WHERE begun_in = ? AND number = ? AND member = ? AND attempt = ?"
    " AND step IS NULL AND rollout IS NOT NULL"
)
_FORGET = "DELETE FROM steps WHERE step < ?"
_LAST = "SELECT step, run_ledger FROM steps WHERE state = 'committed' ORDER BY step DESC LIMIT 1"
_RECORD = "SELECT record FROM steps WHERE step = ? AND record IS NOT NULL"
_ROLLOUTS = "SELECT rollout FROM step_rollouts WHERE step = ? AND rollout IS NOT NULL ORDER BY rowid"


class Position(NamedTuple):
    step: int
    ledger: Ledger


class KeptStep(NamedTuple):
    record: StepRecord
    rollouts: list[ScoredRollout]


class StepTable:
    """Steps of the run with the database `path`; a context manager.

    Keeps `keep_steps` committed steps, or all for None. Entering raises `StoreError` if another trainer holds the lock.
    """

    def __init__(self, path: Path, keep_steps: int | None = 2, clock: Clock = time.time) -> None:
        if keep_steps is not None and keep_steps < 1:
            raise StepError(f"keep_steps: expected at least 1, got {keep_steps}: a run continues from its last step")
        self._path = path
        self._keep_steps = keep_steps
        self._clock = clock
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        with ExitStack() as stack, disk_failures(self._path):
            claim = stack.enter_context(self._path.with_name(f"{self._path.name}-steps").open("ab"))
            if not try_lock(claim):
                raise StoreError(f"{self._path}: another trainer uses it; wait for it or stop it")
            if not self._path.exists():
                self._path.touch(mode=0o600)  # the session store shares this file, with session keys
            connection = sqlite3.connect(
                self._path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._connection = stack.enter_context(closing(connection))
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # takes effect only in a new database
            connection.execute("PRAGMA journal_mode = WAL")
            if has_steps(connection):
                with self._writing():
                    for statement in _UNDO.split(";"):
                        connection.execute(statement)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # a thread may still work for a cancelled caller
            self._resources.close()

    @property
    def position(self) -> Position:
        with self._reading() as connection:
            return read_position(connection)

    def plan(self, step: int) -> None:
        """Record that `step` is about to begin. Open the session store first. A step is collected only once."""
        with self._writing() as connection:
            for statement in TABLES:
                connection.execute(statement)
            row = connection.execute(_STEP, (step,)).fetchone()
            # A step that failed before it was collected is planned already, and keeps its time.
            if row is None or row[0] != "planned":
                connection.execute(_PLAN, (step, self._clock()))

    def keep(self, scored: ScoredRollout) -> None:
        """Keep an ended rollout for a later step, replacing any at its index."""
        session_id = scored.rollout.session_id
        if session_id is None:
            return
        blob, generated = to_bytes(scored), int(scored.rollout.session["ledger"]["generated"])
        with self._writing() as connection:
            make_room(connection, scored.index, session_id)
            connection.execute(_KEEP, (session_id, *place_of(scored.index), generated, blob))

    def recall(self, index: RolloutIndex) -> ScoredRollout | None:
        """Return the rollout kept at `index`, unless a step has it."""
        with self._reading() as connection:
            row = connection.execute(_RECALL, place_of(index)).fetchone() if has_steps(connection) else None
        return None if row is None else from_bytes(row[0])

    def collect(self, record: StepRecord) -> StepRecord:
        """Record a complete step and return it with the store's missing tokens. Raises `LedgerImbalance`."""
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
        """Commit `step`, its update durable. Return the run's ledger. Raises `StoreError` unless next and collected."""
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
        """Delete rollouts and sessions of old steps. Shrink a file that is more than half empty."""
        if self._keep_steps is None:
            return
        with self._reading() as connection:
            first_kept = read_position(connection).step - self._keep_steps
            old = sessions_to_forget(connection, first_kept) if has_steps(connection) else []
        # A process that dies between two transactions leaves the rest to the next call.
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
        """Return the ledger of the run if it ended now. Raises `LedgerImbalance`."""
        with self._reading() as connection:
            position = read_position(connection)
            left = count_left(connection, position.step) if has_steps(connection) else Ledger()
            ledger = total([position.ledger, left])
        ledger.check("run")
        return ledger

    def _count_free(self) -> int:
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
        with self._reading() as connection:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durably else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # SQLite rolls back by itself on a full disk
                    connection.execute("ROLLBACK")
                raise


def read_position(connection: sqlite3.Connection) -> Position:
    """Read the progress. Raises `sqlite3.Error`."""
    row = connection.execute(_LAST).fetchone() if has_steps(connection) else None
    return Position(0, Ledger()) if row is None else Position(row[0] + 1, read_json(row[1], Ledger))


def read_step(database: Path | str, step: int) -> KeptStep:
    """Read a step without writes or locks. Raises `StoreError` if it is not there, `StepError` if damaged."""
    path = Path(database)
    with disk_failures(path), only_reading(path) as connection:
        connection.execute("BEGIN")  # one snapshot for both reads
        row = connection.execute(_RECORD, (step,)).fetchone() if has_steps(connection) else None
        if row is None:
            raise StoreError(f"{path}: there is no step {step}: it has not been collected, or has been forgotten")
        rollouts = [from_bytes(blob) for (blob,) in connection.execute(_ROLLOUTS, (step,))]
    return KeptStep(StepRecord.read(row[0]), rollouts)
