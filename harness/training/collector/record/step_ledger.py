"""Step ledger (I4): generated = trained + masked + dropped(reason).

From session to pack, some of a session's trained and masked tokens become dropped, each with a reason. Nothing changes
generated.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from harness.errors import LedgerImbalance
from harness.sessions.ledger import Ledger, total
from harness.training.collector.rollout_index import RolloutIndex
from harness.training.collector.sample_account import SegmentedSample, StepDropReason
from harness.training.collector.step_outcome import RolloutUse
from harness.training.collector.step_result import PackedStep

_REASONS: Mapping[RolloutUse, StepDropReason] = {
    RolloutUse.COUNTED: StepDropReason.FAILED_ROLLOUT,
    RolloutUse.REPLACED: StepDropReason.FAILED_ROLLOUT,
    RolloutUse.FILTERED: StepDropReason.FILTERED,
    RolloutUse.OVER_SAMPLED: StepDropReason.OVER_SAMPLED,
}


def book_step(packed: PackedStep) -> Ledger:
    """Return the ledger of all rollouts that ended in a step. Raises `LedgerImbalance`."""
    of = f"step {packed.collected.step}"
    samples: dict[RolloutIndex, list[SegmentedSample]] = {}
    for sample in packed.samples:
        samples.setdefault(sample.rollout, []).append(sample)
    booked = []
    for each in packed.collected.rollouts:
        ledger = msgspec.convert(each.ledger, Ledger)
        if each.use is RolloutUse.DELIVERED:
            booked.append(book_rollout(ledger, samples.pop(each.index, ()), f"{of}, {each.index}"))
        elif each.use is not RolloutUse.CARRIED:  # booked in the step in which it ends
            booked.append(book_dropped(ledger, _REASONS[each.use]))
    if samples:
        raise LedgerImbalance(f"{of}: it has samples of rollouts that it does not train: {sorted(samples)}")
    appended = sum(sample.appended for sample in packed.samples)
    return account_step(booked, sum(pack.trained for pack in packed.packs) - appended, of)


def book_rollout(ledger: Ledger, samples: Iterable[SegmentedSample], of: str) -> Ledger:
    """Return the ledger of a trained rollout, from its session's.

    Raises `LedgerImbalance` unless the samples hold what the session delivered.
    """
    trained = masked = 0
    dropped: Counter[str] = Counter()
    for sample in samples:
        trained += sample.trained
        masked += sample.masked
        dropped.update(sample.dropped)
    delivered = trained + masked + dropped.total()
    if delivered != ledger.trained + ledger.masked:
        raise LedgerImbalance(
            f"{of}: its samples account for {delivered} tokens, its session has delivered {ledger.trained} to train and"
            f" {ledger.masked} masked"
        )
    dropped.update(ledger.dropped)
    return Ledger(ledger.generated, trained, masked, dict(dropped), ledger.unknown)


def book_dropped(ledger: Ledger, reason: str) -> Ledger:
    """Return the ledger of an untrained rollout. Earlier drops keep their reasons."""
    dropped = Counter(ledger.dropped)
    if delivered := ledger.trained + ledger.masked:
        dropped[reason] += delivered
    return Ledger(ledger.generated, dropped=dict(dropped), unknown=ledger.unknown)


def account_step(rollouts: Iterable[Ledger], packed: int, of: str) -> Ledger:
    """Return the ledger of a step from all its rollouts.

    `packed` counts trained tokens in packs, without appended ones. Raises `LedgerImbalance`.
    """
    # Two independent counts: session ledgers minus losses, and tokens in packs. A segment lost or packed twice shows as
    # a difference. Appended tokens were not sampled and are in neither.
    ledger = total(rollouts)
    ledger.check(of)
    if packed != ledger.trained:
        raise LedgerImbalance(f"{of}: its packs train {packed} tokens, its rollouts {ledger.trained}")
    return ledger
