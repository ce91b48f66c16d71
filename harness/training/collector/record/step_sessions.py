"""Sessions of steps: the tables, and what they say against the session store in the same database.

A step owns the sessions of rollouts that ended in it. Tokens beyond its count are `undelivered`. An unowned session is
`interrupted`, in the first step planned after it closed. So the run's ledger misses no token.

The caller owns the transaction. All functions raise `sqlite3.Error`.
"""

import sqlite3
from collections.abc import Iterable

from harness.errors import LedgerImbalance
from harness.server.store.stored_sessions import StoredSession, count_sessions, find_taken_over, forget_sessions
from harness.sessions.ledger import DropReason, Ledger, total
from harness.training.collector.groups import RolloutIndex
from harness.training.collector.record.step_ledger import book_dropped
from harness.training.collector.record.step_record import StepRecord
from harness.training.collector.segment_maker import StepDropReason
from harness.training.collector.step_outcome import Disposition

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
_CLAIM = (
    "INSERT INTO step_rollouts VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, NULL)"
    " ON CONFLICT (session_id) DO UPDATE SET step = ?6, generated = ?7, rollout = iif(?8, rollout, NULL)"
)
_WAIT = "INSERT INTO step_rollouts VALUES (?, ?, ?, ?, ?, NULL, ?, NULL) ON CONFLICT (session_id) DO NOTHING"
_ABANDONED = "SELECT session_id, begun_in, number FROM step_rollouts WHERE step IS NULL AND ifnull(begun_in, 0) <= ?"
_FIND = "SELECT step, generated FROM step_rollouts WHERE session_id = ?"
_RECOUNT = "UPDATE step_rollouts SET generated = ? WHERE session_id = ?"
_PLANNED_AT = "SELECT planned_at FROM steps WHERE step <= ? ORDER BY step DESC LIMIT 1"
_BEGIN_OF_KEPT = "SELECT planned_at FROM steps WHERE step = ?"
_OF_OLD_STEPS = "SELECT session_id FROM step_rollouts WHERE step < ?"
_REMOVE = "DELETE FROM step_rollouts WHERE session_id = ?"
_REMOVE_TOKENS = "UPDATE step_rollouts SET rollout = NULL WHERE session_id = ?"

_RECOUNTED_STEPS = 2  # a turn that ends after its session does so within a drain's grace


def has_steps(connection: sqlite3.Connection) -> bool:
    """Return True if a step was ever planned. Raises `sqlite3.Error`."""
    return bool(connection.execute(_HAS_STEPS).fetchone())


def place_of(index: RolloutIndex) -> tuple[int, int, int, int]:
    return (*index.group, index.member, index.attempt)


def claim_rollouts(connection: sqlite3.Connection, record: StepRecord) -> None:
    """Assign sessions of ended rollouts to their step; carried ones wait."""
    for each in record.rollouts:
        if each.session_id is None:
            continue
        make_room(connection, each.index, each.session_id)
        row = (each.session_id, *place_of(each.index))
        if each.use is Disposition.CARRIED:
            connection.execute(_WAIT, (*row, each.generated))
        else:
            connection.execute(_CLAIM, (*row, record.step, each.generated, each.use is Disposition.DELIVERED))


def make_room(connection: sqlite3.Connection, index: RolloutIndex, session_id: str) -> None:
    """Delete a session of a dead process that waits at `index`."""
    connection.execute(
        "DELETE FROM step_rollouts WHERE begun_in = ? AND number = ? AND member = ? AND attempt = ?"
        " AND session_id != ? AND step IS NULL",
        (*place_of(index), session_id),
    )


def count_unclaimed(connection: sqlite3.Connection, record: StepRecord, planned_at: float) -> Ledger:
    """Claim and count what the store has beyond steps and `record`. Raises `LedgerImbalance` if it has less."""
    step = record.step
    carried = {each.session_id for each in record.rollouts if each.use is Disposition.CARRIED}
    since = connection.execute(_PLANNED_AT, (step - _RECOUNTED_STEPS,)).fetchone()
    has_old_ones = _abandon_rollouts(connection, record)  # these may have waited for any number of steps
    found = []
    for stored in list(count_sessions(connection, 0.0 if has_old_ones or since is None else since[0])):
        if stored.closed_at is None or stored.is_taken_over:  # an open session may still get a turn
            continue
        row = connection.execute(_FIND, (stored.session_id,)).fetchone()
        if row is None and stored.closed_at < planned_at and stored.session_id not in carried:
            found.append(_book_interrupted(stored))
            connection.execute(_CLAIM, (stored.session_id, None, None, None, None, step, stored.generated, False))
        elif row is not None and row[0] is not None and row[1] != stored.generated:
            found.append(_book_late(stored, step=row[0], told=row[1]))
            connection.execute(_RECOUNT, (stored.generated, stored.session_id))
    return total(found)


def count_left(connection: sqlite3.Connection, committed: int) -> Ledger:
    """Count tokens that the first `committed` steps lack, open sessions included. Raises like `count_unclaimed`."""
    left = []
    for stored in list(count_sessions(connection)):
        row = connection.execute(_FIND, (stored.session_id,)).fetchone()
        if stored.is_taken_over:
            continue
        if row is None or row[0] is None or row[0] >= committed:
            left.append(_book_interrupted(stored))
        elif row[1] != stored.generated:
            left.append(_book_late(stored, step=row[0], told=row[1]))
    return total(left)


def sessions_to_forget(connection: sqlite3.Connection, first_kept: int) -> list[str]:
    """Return sessions of steps before `first_kept`, or taken over before it was planned."""
    old = [session_id for (session_id,) in connection.execute(_OF_OLD_STEPS, (first_kept,))]
    began = connection.execute(_BEGIN_OF_KEPT, (first_kept,)).fetchone()
    return old if began is None else [*old, *find_taken_over(connection, began[0])]


def forget_rollouts(connection: sqlite3.Connection, session_ids: Iterable[str]) -> int:
    """Delete tokens of sessions. Return the number deleted."""
    ids = list(session_ids)
    gone = forget_sessions(connection, ids)
    connection.executemany(_REMOVE_TOKENS, [(each,) for each in ids])
    # Open sessions keep their row, so that they are not counted again.
    connection.executemany(_REMOVE, [(each,) for each in gone])
    return len(gone)


def _abandon_rollouts(connection: sqlite3.Connection, record: StepRecord) -> bool:
    waiting = connection.execute(_ABANDONED, (record.step,)).fetchall()
    abandoned = [(session_id,) for session_id, *group in waiting if tuple(group) not in record.carried_groups]
    connection.executemany(_REMOVE, abandoned)
    return bool(abandoned)


def _book_late(stored: StoredSession, step: int, told: int) -> Ledger:
    late = stored.generated - told
    if late < 0:
        raise LedgerImbalance(
            f"step {step}: the store holds {stored.generated} sampled tokens of session {stored.session_id}, its ledger"
            f" {told}"
        )
    return Ledger(late, dropped={DropReason.UNDELIVERED: late})


def _book_interrupted(stored: StoredSession) -> Ledger:
    return book_dropped(Ledger(stored.generated, stored.generated, unknown=stored.unknown), StepDropReason.INTERRUPTED)
