"""Figures of a step: its ledger, and its line of `telemetry.jsonl`. Pure.

Ledger (I4): generated + inherited = trained + masked + dropped(reason). From session to pack, some of a session's
trained and masked tokens become dropped, each with a reason. Nothing changes the left side.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from statistics import fmean

from harness.decoding import convert
from harness.errors import LedgerImbalance
from harness.samples.packing import fewest_packs
from harness.samples.proximal import join_staleness
from harness.sessions.ledger import DropReason, Ledger, total
from harness.training.collector.groups import RolloutIndex
from harness.training.collector.record.step_record import StepRecord
from harness.training.collector.segment_maker import SegmentedSample, StepDropReason
from harness.training.collector.step_outcome import Disposition, PackedStep, TrainedStep

_LOSSES: Mapping[Disposition, StepDropReason] = {
    Disposition.COUNTED: StepDropReason.FAILED_ROLLOUT,
    Disposition.REPLACED: StepDropReason.FAILED_ROLLOUT,
    Disposition.FILTERED: StepDropReason.FILTERED,
    Disposition.OVER_SAMPLED: StepDropReason.OVER_SAMPLED,
}

# Dashboards depend on the keys, so empty ones are 0. Keys of a custom encoder come last.
_ENCODER_COUNTS = ("parse_truncated", "parse_dropped_invalid", "drop_poly", "fn_count")
_REASONS = tuple(chain(DropReason, StepDropReason))
_RAW = (Disposition.DELIVERED, Disposition.COUNTED)


def book_step(packed: PackedStep) -> Ledger:
    """Return the ledger of all rollouts that ended in a step. Raises `LedgerImbalance`."""
    of = f"step {packed.collected.step}"
    samples: dict[RolloutIndex, list[SegmentedSample]] = {}
    for sample in packed.samples:
        samples.setdefault(sample.rollout, []).append(sample)
    booked = []
    for each in packed.collected.rollouts:
        ledger = convert(each.ledger, Ledger)
        if each.use is Disposition.DELIVERED:
            booked.append(book_rollout(ledger, samples.pop(each.index, ()), f"{of}, {each.index}"))
        elif each.use is not Disposition.CARRIED:  # booked in the step in which it ends
            booked.append(book_dropped(ledger, _LOSSES[each.use]))
    if samples:
        raise LedgerImbalance(f"{of}: it has samples of rollouts that it does not train: {sorted(samples)}")
    appended = sum(sample.appended for sample in packed.samples)
    return account_step(booked, sum(pack.trained for pack in packed.packs) - appended, of)


def book_rollout(ledger: Ledger, samples: Iterable[SegmentedSample], of: str) -> Ledger:
    """Return the ledger of a trained rollout. Raises `LedgerImbalance` unless samples hold what was delivered."""
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
    return replace(ledger, trained=trained, masked=masked, dropped=dict(dropped))


def book_dropped(ledger: Ledger, reason: str) -> Ledger:
    """Return the ledger of an untrained rollout. Earlier drops keep their reasons."""
    dropped = Counter(ledger.dropped)
    if delivered := ledger.trained + ledger.masked:
        dropped[reason] += delivered
    return replace(ledger, trained=0, masked=0, dropped=dict(dropped))


def account_step(rollouts: Iterable[Ledger], packed: int, of: str) -> Ledger:
    """Return a step's ledger; `packed` counts trained tokens, without appended ones. Raises `LedgerImbalance`."""
    # Two independent counts: session ledgers minus losses, and tokens in packs. A segment lost or packed twice shows as
    # a difference. Appended tokens were not sampled and are in neither.
    ledger = total(rollouts)
    ledger.check(of)
    if packed != ledger.trained:
        raise LedgerImbalance(f"{of}: its packs train {packed} tokens, its rollouts {ledger.trained}")
    return ledger


def step_telemetry(
    trained: TrainedStep, record: StepRecord, *, packing_length: int, is_guarded: bool = False
) -> dict[str, float]:
    """Return the figures of a step. `is_guarded`: every engine has proved that it runs the repeat guard."""
    packed, times, report = trained.packed, trained.times, trained.report
    collected, ledger = packed.collected, record.ledger
    ended = [each for each in collected.rollouts if each.use is not Disposition.CARRIED]
    rewards = [each.reward for each in ended if each.reward is not None]
    lengths = [sample.tokens for sample in packed.samples if not sample.reason]
    packs = len(packed.packs)
    lags = [(sample.staleness, sample.sampled) for sample in packed.samples if sample.staleness is not None]
    dropped = dict.fromkeys(_REASONS, 0) | dict(sorted(ledger.dropped.items()))
    return {
        "global_step": collected.step,
        "policy_version": packed.version,
        "rollout_seed_base": record.rollout_seed_base,
        "stage2/raw_rollouts": sum(each.use in _RAW for each in collected.rollouts),
        "rollout/reward_mean": fmean(rewards) if rewards else 0.0,
        "rollout/groups_dropped": sum(record.dropped_groups.values()),
        "rollout/groups_ended": len(record.ended_groups),
        **{f"rollout/{use}": sum(each.use is use for each in collected.rollouts) for use in Disposition},
        "rollout/dropped_trailing_turns": sum(sample.dropped_turns for sample in packed.samples),
        "rollout/repeat_terminate_active": int(is_guarded),
        "rollout/repeat_terminate_triggered_sequences": sum(sample.repeat_terminated for sample in packed.samples),
        **join_staleness(lags),
        **_teacher_gaps(packed.samples),
        "train/samples_total": len(lengths),
        "train/micro_steps": packs,
        "train/packing_efficiency": fewest_packs(lengths, packing_length) / packs if packs else 0.0,
        **report.telemetry(),
        "train/pack_waits_s": times.pack_waits_s,
        "time/step_s": times.total_s,
        "time/rollout_generate_s": collected.generate_s,
        "time/forward_s": times.forward_s,
        "time/finish_s": times.finish_s,
        "time/overlap_share": times.overlap_s / times.forward_s if times.forward_s else 0.0,
        "ledger/generated": ledger.generated,
        "ledger/trained": ledger.trained,
        "ledger/masked": ledger.masked,
        "ledger/unknown_requests": ledger.unknown.requests,
        "ledger/unknown_tokens": ledger.unknown.tokens,
        "ledger/difference": ledger.difference,
        **{f"dropped/{reason}": dropped.pop(reason) for reason in _REASONS},
        **dict.fromkeys(_ENCODER_COUNTS, 0),
        **{f"dropped/{reason}": tokens for reason, tokens in dropped.items()},
        **dict(sorted(packed.encoder_counts.items())),
    }


def _teacher_gaps(samples: Iterable[SegmentedSample]) -> dict[str, float]:
    """Return the mean per teacher: an estimate of the divergence from the policy to it, in nats per token."""
    gaps: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for sample in samples:
        for name, gap in sample.teacher_gaps.items():
            gaps[name].append(gap)
    return {
        f"rollout/teacher_gap/{name}": sum(gap for gap, _ in each) / max(1, sum(tokens for _, tokens in each))
        for name, each in gaps.items()
    }
