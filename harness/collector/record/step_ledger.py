"""Where the sampled tokens of a step went (I4): generated = trained + masked + dropped(reason), from session to pack.

A session's own ledger ends with its samples: *trained* there means delivered with loss mask 1. A step takes fewer than
it is given: groups are filtered, over-sampled or stale, rollouts fail, encoders drop and cut, packs have an end. Each
of these moves tokens from trained or masked to dropped, under a reason of its own beside those of the session, and
never changes what was generated.

Two sides are counted apart. One is the sessions' ledgers, with what was taken from each; the other is what lies in the
packs. `account_step` holds them against each other, so a segment that is lost between encoder and pack, or packed
twice, is a `LedgerImbalance`.

Tokens that an encoder appended were sampled by nobody: they are on neither side.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from harness.collector.rollout_index import RolloutIndex
from harness.collector.sample_account import SegmentedSample, StepDropReason
from harness.collector.step_outcome import RolloutUse
from harness.collector.step_result import PackedStep
from harness.errors import LedgerImbalance
from harness.sessions.ledger import Ledger, total

_REASONS: Mapping[RolloutUse, StepDropReason] = {
    RolloutUse.COUNTED: StepDropReason.FAILED_ROLLOUT,
    RolloutUse.REPLACED: StepDropReason.FAILED_ROLLOUT,
    RolloutUse.FILTERED: StepDropReason.FILTERED,
    RolloutUse.OVER_SAMPLED: StepDropReason.OVER_SAMPLED,
}
"""Of the rollouts that are not trained. One that is carried is in the books of the step in which it ends."""


def book_step(packed: PackedStep) -> Ledger:
    """The ledger of all rollouts that came to their end in a step. Raises `LedgerImbalance`."""
    of = f"step {packed.collected.step}"
    samples: dict[RolloutIndex, list[SegmentedSample]] = {}
    for sample in packed.samples:
        samples.setdefault(sample.rollout, []).append(sample)
    booked = []
    for each in packed.collected.rollouts:
        ledger = msgspec.convert(each.ledger, Ledger)
        if each.use is RolloutUse.DELIVERED:
            booked.append(book_rollout(ledger, samples.pop(each.index, ()), f"{of}, {each.index}"))
        elif each.use is not RolloutUse.CARRIED:
            booked.append(book_dropped(ledger, _REASONS[each.use]))
    if samples:
        raise LedgerImbalance(f"{of}: it has samples of rollouts that it does not train: {sorted(samples)}")
    appended = sum(sample.appended for sample in packed.samples)
    return account_step(booked, sum(pack.trained for pack in packed.packs) - appended, of)


def book_rollout(ledger: Ledger, samples: Iterable[SegmentedSample], of: str) -> Ledger:
    """The ledger of a rollout, named `of`, whose samples are the step's; `ledger` is that of its session.

    Raises `LedgerImbalance` when the samples do not hold what the session has delivered.
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
    """The ledger of a rollout of which a step trains nothing; what its session had dropped keeps its reasons."""
    dropped = Counter(ledger.dropped)
    if delivered := ledger.trained + ledger.masked:
        dropped[reason] += delivered
    return Ledger(ledger.generated, dropped=dict(dropped), unknown=ledger.unknown)


def account_step(rollouts: Iterable[Ledger], packed: int, of: str) -> Ledger:
    """The ledger of a step, named `of`, out of those of all its rollouts, whatever became of them.

    `packed` are the tokens to train in its packs, counted there, without those that an encoder appended. Raises
    `LedgerImbalance` when that is not what the rollouts say, or something else does not add up.
    """
    ledger = total(rollouts)
    ledger.check(of)
    if packed != ledger.trained:
        raise LedgerImbalance(f"{of}: its packs train {packed} tokens, its rollouts {ledger.trained}")
    return ledger
