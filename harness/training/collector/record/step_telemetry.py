"""Step telemetry: a line of `telemetry.jsonl`, with fixed keys in fixed order. Pure."""

from itertools import chain
from statistics import fmean

from harness.samples.packing import fewest_packs
from harness.samples.proximal import join_staleness
from harness.sessions.ledger import DropReason
from harness.training.collector.record.step_record import StepRecord
from harness.training.collector.sample_account import StepDropReason
from harness.training.collector.step_outcome import RolloutUse
from harness.training.collector.step_result import TrainedStep

# Dashboards depend on the keys, so empty ones are 0. Keys of a custom encoder come last.
_ENCODER_COUNTS = ("parse_truncated", "parse_dropped_invalid", "drop_poly", "fn_count")
_REASONS = tuple(chain(DropReason, StepDropReason))
_RAW = (RolloutUse.DELIVERED, RolloutUse.COUNTED)


def step_telemetry(
    trained: TrainedStep, record: StepRecord, *, packing_length: int, is_guarded: bool = False
) -> dict[str, float]:
    """Return the figures of a step.

    `is_guarded`: every engine has proved that it runs the repeat guard.
    """
    packed, times, report = trained.packed, trained.times, trained.report
    collected, ledger = packed.collected, record.ledger
    ended = [each for each in collected.rollouts if each.use is not RolloutUse.CARRIED]
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
        **{f"rollout/{use}": sum(each.use is use for each in collected.rollouts) for use in RolloutUse},
        "rollout/dropped_trailing_turns": sum(sample.dropped_turns for sample in packed.samples),
        "rollout/repeat_terminate_active": int(is_guarded),
        "rollout/repeat_terminate_triggered_sequences": sum(sample.repeat_terminated for sample in packed.samples),
        **join_staleness(lags),
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
