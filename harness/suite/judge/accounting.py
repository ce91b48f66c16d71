"""Every token of a run, accounted for (I4): three sources that know nothing of each other must agree.

The session store says what was generated, the ledgers of the sessions where it went, and the exported samples what a
trainer will see. Sessions that no final rollout stands for are dropped: as `replayed` those of rollouts that were
played again on request, as `interrupted` the others (earlier attempts, a killed run). A difference is a bug and raises
`LedgerImbalance`. Of what engines did not hand over (`unknown`) the store has the sum; no session may say more.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from harness.errors import LedgerImbalance
from harness.sessions.ledger import DropReason, Ledger, Unknown, total
from harness.store.sqlite import count_generated, count_unknown
from harness.suite.record.attached_sessions import count_attached, read_attached_unknown
from harness.suite.record.rollout_table import (
    INTERRUPTED,
    REPLAYED,
    RolloutRecord,
    find_replayed,
    has_table,
    reading_run,
)
from harness.types import Sample


def account_run(database: Path, final: Sequence[RolloutRecord], samples: Iterable[Sample]) -> Ledger:
    """The ledger of all sessions in `database`. Raises `LedgerImbalance` naming what does not add up."""
    ledger = ledger_of(database, final)
    delivered = sum(int(sample.loss_mask.sum()) for sample in samples)
    if delivered != ledger.trained:
        raise LedgerImbalance(f"run: the samples train {delivered} tokens, the ledger says {ledger.trained}")
    return ledger


def ledger_of(database: Path, final: Sequence[RolloutRecord]) -> Ledger:
    """Where the tokens in `database` went when `final` are its rollouts, whatever samples were made of them.

    `final` must be read before: while a run goes on, the sessions of rollouts that end later count as `interrupted`.
    Raises `LedgerImbalance`.
    """
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
        # They came to the store after the session was read with turns in flight: nobody got them.
        undelivered.append(Ledger(late, dropped={DropReason.UNDELIVERED: late} if late else {}))
    counted = {record.session_id for record in final}
    with reading_run(database) as connection:
        replayed = {attempt.session_id for attempt in find_replayed(connection)}
    dropped = Counter[str]()
    for session_id, tokens in generated.items():
        if session_id not in counted:
            dropped[REPLAYED if session_id in replayed else INTERRUPTED] += tokens
    abandoned = Ledger(dropped.total(), dropped=dict(+dropped))
    ledger = total([*(record.ledger for record in final), *undelivered, abandoned])
    ledger.check("run")
    unknown = count_unheard(database)
    if unknown.requests < ledger.unknown.requests or unknown.tokens < ledger.unknown.tokens:
        raise LedgerImbalance(f"run: the store holds {unknown} as unknown, the sessions {ledger.unknown}")
    return replace(ledger, unknown=unknown)


def count_unheard(database: Path) -> Unknown:
    """Requests that engines did not hand over in any session of the run."""
    with reading_run(database) as connection:
        attached = read_attached_unknown(connection)
        if not has_table(connection, "sessions"):
            return attached
    return sum(count_unknown(database).values(), attached)


def count_tokens(database: Path) -> dict[str, int]:
    """Sampled tokens of every session of the run: of the store in `database`, and of the servers it was attached to."""
    with reading_run(database) as connection:
        attached = count_attached(connection)
        if not has_table(connection, "sessions"):  # the run ended before there was a store, or has none
            return attached
    return attached | count_generated(database)
