"""Account for every token (I4): store, session ledgers and exported samples must agree.

Sessions without a final rollout are dropped, as `replayed` or `interrupted`. A difference is a bug: `LedgerImbalance`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from harness.errors import LedgerImbalance
from harness.server.store.sqlite import count_generated, count_unknown
from harness.sessions.ledger import DropReason, Ledger, Unknown, total
from harness.suite.record.attached_sessions import count_attached, read_attached_unknown
from harness.suite.record.rollout_table import (
    INTERRUPTED,
    REPLAYED,
    RolloutRecord,
    find_inherited,
    find_superseded,
    has_table,
    reading_run,
)
from harness.types import Sample


def account_run(database: Path, final: Sequence[RolloutRecord], samples: Iterable[Sample]) -> Ledger:
    """Return the run's ledger. Raises `LedgerImbalance`."""
    ledger = ledger_of(database, final)
    delivered = sum(int(sample.loss_mask.sum()) for sample in samples)
    if delivered != ledger.trained:
        raise LedgerImbalance(f"run: the samples train {delivered} tokens, the ledger says {ledger.trained}")
    return ledger


def ledger_of(database: Path, final: Sequence[RolloutRecord]) -> Ledger:
    """Return the run's ledger. Raises `LedgerImbalance`. Read `final` first: later sessions count as `interrupted`."""
    generated = count_tokens(database)
    undelivered = []
    for record in final:
        record.ledger.check(f"session {record.number}")
        stored = generated.get(record.session_id or "", 0)
        late = stored - record.ledger.generated
        if late < 0 or (late and not record.session.turns_in_flight):
            raise LedgerImbalance(
                f"session {record.number}: the store holds {stored} sampled tokens,"
                f" its ledger {record.ledger.generated}"
            )
        # Turns in flight when the session was read: their tokens reached the store later, but no sample.
        undelivered.append(Ledger(late, dropped={DropReason.UNDELIVERED: late} if late else {}))
    counted = {record.session_id for record in final}
    with reading_run(database) as connection:
        replayed = {each.session_id for each in find_superseded(connection) if each.is_final}
        inherited = find_inherited(connection, counted) - counted
    dropped = Counter[str]()
    for session_id, tokens in generated.items():
        if session_id in inherited:
            dropped[DropReason.SUPERSEDED] += tokens
        elif session_id not in counted:
            dropped[REPLAYED if session_id in replayed else INTERRUPTED] += tokens
    abandoned = Ledger(dropped.total(), dropped=dict(+dropped))
    # What an heir took over is in its own ledger; only the rest of the earlier life was lost.
    moved = sum(record.ledger.inherited for record in final)
    taken = Ledger(inherited=-moved, dropped={DropReason.SUPERSEDED: -moved} if moved else {})
    ledger = total([*(record.ledger for record in final), *undelivered, abandoned, taken])
    ledger = replace(ledger, dropped={reason: tokens for reason, tokens in ledger.dropped.items() if tokens})
    ledger.check("run")
    unknown = count_unheard(database)
    # The store has the sum of what engines did not report. Sessions may not report more.
    if unknown.requests < ledger.unknown.requests or unknown.tokens < ledger.unknown.tokens:
        raise LedgerImbalance(f"run: the store holds {unknown} as unknown, the sessions {ledger.unknown}")
    return replace(ledger, unknown=unknown)


def count_unheard(database: Path) -> Unknown:
    """Sum the requests whose tokens engines did not report."""
    with reading_run(database) as connection:
        attached = read_attached_unknown(connection)
        if not has_table(connection, "sessions"):
            return attached
    return sum(count_unknown(database).values(), attached)


def count_tokens(database: Path) -> dict[str, int]:
    """Return each session's sampled tokens, from the store and attached servers."""
    with reading_run(database) as connection:
        attached = count_attached(connection)
        if not has_table(connection, "sessions"):  # ended before the store opened, or attached
            return attached
    return attached | count_generated(database)
