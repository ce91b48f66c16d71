"""Tables of steps in the database of a run, with constraints that the database enforces."""

import sqlite3
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.errors import StoreError
from harness.machine.disk import disk_failures
from harness.server.store.only_reading import only_reading
from harness.sessions.ledger import Ledger
from harness.training.collector.record.kept_rollout import from_bytes
from harness.training.collector.record.step_record import StepRecord
from harness.training.collector.rollout_index import ScoredRollout

# `steps` has a row per retained step. `step_rollouts` has one per session that a step owns, or will own (`step` is
# NULL). `trained_groups` has the training step of every group of the run: groups are trained whole, so a rollout is in
# at most one committed step.
TABLES = (
    """
CREATE TABLE IF NOT EXISTS steps (
    step       INTEGER PRIMARY KEY,
    state      TEXT NOT NULL CHECK (state IN ('planned', 'collected', 'committed')),
    planned_at REAL NOT NULL,
    record     TEXT CHECK (state = 'planned' OR record IS NOT NULL),
    run_ledger TEXT CHECK (state != 'committed' OR run_ledger IS NOT NULL)
)""",
    """
CREATE TABLE IF NOT EXISTS step_rollouts (
    session_id TEXT PRIMARY KEY,
    begun_in   INTEGER,
    number     INTEGER,
    member     INTEGER,
    attempt    INTEGER,
    step       INTEGER,
    generated  INTEGER NOT NULL,
    rollout    BLOB,
    UNIQUE (begun_in, number, member, attempt)
)""",
    "CREATE INDEX IF NOT EXISTS step_rollouts_by_step ON step_rollouts (step)",
    """
CREATE TABLE IF NOT EXISTS trained_groups (
    begun_in INTEGER NOT NULL,
    number   INTEGER NOT NULL,
    step     INTEGER NOT NULL,
    PRIMARY KEY (begun_in, number)
) WITHOUT ROWID""",
    """
CREATE TRIGGER IF NOT EXISTS steps_go_forward BEFORE UPDATE OF state ON steps
WHEN NOT (OLD.state = 'planned' AND NEW.state = 'collected' OR OLD.state = 'collected' AND NEW.state = 'committed')
BEGIN SELECT RAISE(ABORT, 'a step is planned, then collected, then committed'); END""",
    """
CREATE TRIGGER IF NOT EXISTS rollouts_stay BEFORE UPDATE OF step ON step_rollouts
WHEN NEW.step IS NOT OLD.step AND EXISTS (SELECT 1 FROM steps WHERE step = OLD.step AND state = 'committed')
BEGIN SELECT RAISE(ABORT, 'the rollout is in a committed step'); END""",
)
"""Repeatable. Run with the first step: a store begins with an empty database."""

_HAS_STEPS = "SELECT 1 FROM sqlite_master WHERE name = 'steps'"
_LAST = "SELECT step, run_ledger FROM steps WHERE state = 'committed' ORDER BY step DESC LIMIT 1"
_RECORD = "SELECT record FROM steps WHERE step = ? AND record IS NOT NULL"
_ROLLOUTS = "SELECT rollout FROM step_rollouts WHERE step = ? AND rollout IS NOT NULL ORDER BY rowid"


class Position(NamedTuple):
    """Progress of training."""

    step: int
    """Next step."""
    ledger: Ledger


class KeptStep(NamedTuple):
    """Collected or committed step."""

    record: StepRecord
    rollouts: list[ScoredRollout]


def has_steps(connection: sqlite3.Connection) -> bool:
    """Return True if a step was ever planned. Raises `sqlite3.Error`."""
    return bool(connection.execute(_HAS_STEPS).fetchone())


def read_position(connection: sqlite3.Connection) -> Position:
    """Read the progress. Raises `sqlite3.Error`."""
    row = connection.execute(_LAST).fetchone() if has_steps(connection) else None
    return Position(0, Ledger()) if row is None else Position(row[0] + 1, msgspec.json.decode(row[1], type=Ledger))


def read_step(database: Path | str, step: int) -> KeptStep:
    """Read a step without writes or locks, even while the run continues.

    Raises `StoreError` if it is not collected yet or forgotten, `StepError` if damaged.
    """
    path = Path(database)
    with disk_failures(path), only_reading(path) as connection:
        connection.execute("BEGIN")  # one snapshot for both reads
        row = connection.execute(_RECORD, (step,)).fetchone() if has_steps(connection) else None
        if row is None:
            raise StoreError(f"{path}: there is no step {step}: it has not been collected, or has been forgotten")
        rollouts = [from_bytes(blob) for (blob,) in connection.execute(_ROLLOUTS, (step,))]
    return KeptStep(StepRecord.read(row[0]), rollouts)
