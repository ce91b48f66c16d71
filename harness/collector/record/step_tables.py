"""The tables of steps in the database of a run, and what the database itself forbids.

`steps` has a row for each step that is not done with: planned, then collected, then committed, in that order and never
back from the last. `step_rollouts` has one for each session that a step stands for, or will: a rollout that has ended
waits there for its step (`step` is NULL), and belongs to that step for good once it is committed. `trained_groups` says
of every group of the whole run which step trained it. Groups are trained whole, so a rollout is in at most one
committed step, also when nothing else of that step is left; a row of it takes about ten bytes.

These are tables beside a session store's, in the same file. They are made with the first step, because a store begins
with an empty database.
"""

import sqlite3
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.collector.record.kept_rollout import from_bytes
from harness.collector.record.step_record import StepRecord
from harness.collector.rollout_index import ScoredRollout
from harness.errors import StoreError
from harness.machine.disk import disk_failures
from harness.sessions.ledger import Ledger
from harness.store.only_reading import only_reading

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
"""Statements that may be run again."""

_HAS_STEPS = "SELECT 1 FROM sqlite_master WHERE name = 'steps'"
_LAST = "SELECT step, run_ledger FROM steps WHERE state = 'committed' ORDER BY step DESC LIMIT 1"
_RECORD = "SELECT record FROM steps WHERE step = ? AND record IS NOT NULL"
_ROLLOUTS = "SELECT rollout FROM step_rollouts WHERE step = ? AND rollout IS NOT NULL ORDER BY rowid"


class Position(NamedTuple):
    """How far training has come."""

    step: int
    """The next one; so many are committed."""
    ledger: Ledger
    """Of all sessions that came to their end in these."""


class KeptStep(NamedTuple):
    """A step that is collected or committed, with what it was made of."""

    record: StepRecord
    rollouts: list[ScoredRollout]
    """Those that it trains, as they were then."""


def has_steps(connection: sqlite3.Connection) -> bool:
    """There are tables of steps in the database: a step was planned once. Raises `sqlite3.Error`."""
    return bool(connection.execute(_HAS_STEPS).fetchone())


def read_position(connection: sqlite3.Connection) -> Position:
    """Raises `sqlite3.Error`."""
    row = connection.execute(_LAST).fetchone() if has_steps(connection) else None
    return Position(0, Ledger()) if row is None else Position(row[0] + 1, msgspec.json.decode(row[1], type=Ledger))


def read_step(database: Path | str, step: int) -> KeptStep:
    """A step of the run whose database that is, while the run goes on or afterwards; nothing is written or locked.

    Raises `StoreError` when it is not there: not collected yet, or forgotten. `StepError` when it is damaged.
    """
    path = Path(database)
    with disk_failures(path), only_reading(path) as connection:
        connection.execute("BEGIN")  # both from one moment
        row = connection.execute(_RECORD, (step,)).fetchone() if has_steps(connection) else None
        if row is None:
            raise StoreError(f"{path}: there is no step {step}: it has not been collected, or has been forgotten")
        rollouts = [from_bytes(blob) for (blob,) in connection.execute(_ROLLOUTS, (step,))]
    return KeptStep(StepRecord.read(row[0]), rollouts)
