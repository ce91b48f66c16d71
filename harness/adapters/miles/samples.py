"""Conversion of a rollout to miles samples. Pure. No column is None: miles infers columns from the first sample."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from harness.adapters.agents import AGENT_RESULT, stamp_stated
from harness.adapters.miles.settings import COMMIT
from harness.adapters.sampling import require_no_masks
from harness.errors import AdapterError
from harness.samples.columns import trainer_columns, unsampled
from harness.samples.delivery import DeliveredTokens, weigh
from harness.samples.miles_codec import require_experts
from harness.samples.rollout import ENDED_WELL, Rollout, stated_number
from harness.types import Json, Sample

FIELDS = frozenset(
    {
        *("group_index", "index", "rollout_id", "prompt", "tokens", "response", "response_length", "reward"),
        *("loss_mask", "weight_versions", "rollout_log_probs", "status", "metadata", "train_metadata"),
        *("non_generation_time", "prefix_cache_info", "rollout_routed_experts"),
    }
)
"""Fields of miles' `Sample` that this module uses."""

STAMPS = "harness"
"""Metadata key of the session's facts."""

_KEPT_IDS = "rollout_top_p_token_ids"

Decode = Callable[[list[int]], str]
"""Function that decodes token ids with miles' tokenizer."""


def require_fields(sample: Any) -> None:
    """Raise `AdapterError` naming the fields that `sample` lacks."""
    missing = sorted(name for name in FIELDS if not hasattr(sample, name))
    if missing:
        raise AdapterError(f"Sample has no {', '.join(missing)}; expected the interface of miles {COMMIT}")


def aborted_sample(origin: Any, reason: str) -> Any:
    """Return a sample without tokens in place of `origin`."""
    sample = _write_columns(deepcopy(origin), unsampled((), ()), lambda _ids: "")
    sample.status = type(origin.status).ABORTED
    sample.metadata = {**origin.metadata, STAMPS: {"outcome_detail": reason}}
    return sample


def samples_of(origin: Any, rollout: Rollout, decode: Decode, *, trusts_agent: bool) -> list[Any]:
    """Return the samples of `rollout`, at least one. An untrusted result goes under `AGENT_RESULT`."""
    if not rollout.samples:
        sample = aborted_sample(origin, rollout.outcome.detail)
        sample.metadata[STAMPS] = _stamps(rollout)
        return [sample]
    rollout = _mask_unscored(stamp_stated(rollout) if trusts_agent else rollout)
    samples = [_sample_of(origin, ours, rollout, decode, trusts_agent=trusts_agent) for ours in rollout.samples]
    if len(samples) > 1:
        for sample in samples:
            # By this id miles weighs samples as one rollout.
            sample.rollout_id = origin.index if origin.rollout_id is None else origin.rollout_id
    return samples


def _sample_of(origin: Any, ours: Sample, rollout: Rollout, decode: Decode, *, trusts_agent: bool) -> Any:
    if not hasattr(origin, _KEPT_IDS):  # as slime's have
        require_no_masks(ours, "miles")
    sample = _write_columns(deepcopy(origin), ours, decode)
    result = (rollout.agent_result or {}) if trusts_agent else {}
    untrusted = {} if trusts_agent else {AGENT_RESULT: rollout.agent_result}
    status = ours.status.value if rollout.outcome.kind in ENDED_WELL else "aborted"
    sample.status = type(origin.status)(status)
    sample.metadata = {
        **untrusted,
        **origin.metadata,
        **result,
        STAMPS: {
            **ours.metadata,
            "weight": ours.weight,
            "repeat_terminated": ours.repeat_terminated,
            **_stamps(rollout),
        },
    }
    reward = stated_number(result.get("reward"))
    if reward is not None:
        sample.reward = reward
    own = set(ours.metadata["turns"])
    turns = [turn for turn in rollout.session["turns"] if turn["turn"] in own]
    sample.prefix_cache_info = type(origin.prefix_cache_info)(
        cached_tokens=sum(turn["notes"].get("cached_tokens", 0) for turn in turns),
        total_prompt_tokens=sum(turn["prompt_length"] for turn in turns),
    )
    sample.non_generation_time = _time_elsewhere(result, rollout)
    return sample


def _stamps(rollout: Rollout) -> Json:
    outcome = rollout.outcome
    return {"outcome": str(outcome.kind), "outcome_detail": outcome.detail, "ledger": rollout.session["ledger"]}


def _write_columns(sample: Any, ours: Sample, decode: Decode) -> Any:
    length = ours.response_length
    sample.tokens = ours.tokens.tolist()
    sample.response_length = length
    sample.response = decode(sample.tokens[len(sample.tokens) - length :]) if length else ""
    sample.loss_mask = ours.loss_mask.tolist()
    sample.rollout_log_probs = ours.rollout_log_probs.tolist()
    sample.weight_versions = list(ours.weight_versions)
    if ours.teachers:
        _write_teacher(sample, ours)
    columns = {name: column.tolist() for name, column in trainer_columns(ours).items()}
    sample.train_metadata = {**(sample.train_metadata or {}), **columns}
    sample.rollout_routed_experts = require_experts(ours, np.int32)
    if (masks := ours.sampling_mask) is not None:
        setattr(sample, _KEPT_IDS, masks.values.tolist())
        sample.rollout_top_p_token_offsets = masks.offsets.tolist()
    return sample


def _write_teacher(sample: Any, ours: Sample) -> None:
    if len(ours.teachers) > 1 or not hasattr(sample, "teacher_log_probs"):
        raise AdapterError(
            f"teachers: expected one, in a Sample with teacher_log_probs, got {', '.join(ours.teachers)};"
            " name it in the session's teachers"
        )
    [column] = ours.teachers.values()
    sample.teacher_log_probs = np.nan_to_num(column).tolist()


def _mask_unscored(rollout: Rollout) -> Rollout:
    # miles subtracts a teacher's logprobs from its own and knows no missing one, so a token without one is not trained.
    if not any(each.teachers for each in rollout.samples):
        return rollout
    masks = (
        np.where(np.isnan([*each.teachers.values()]).any(axis=0), 0, each.loss_mask).astype(np.uint8)
        for each in rollout.samples
    )
    samples = weigh([replace(each, loss_mask=mask) for each, mask in zip(rollout.samples, masks, strict=True)])
    lost = DeliveredTokens.of(rollout.samples).trained - DeliveredTokens.of(samples).trained
    ledger = rollout.session["ledger"]
    ledger = {**ledger, "trained": ledger["trained"] - lost, "masked": ledger["masked"] + lost}
    return replace(rollout, samples=tuple(samples), session={**rollout.session, "ledger": ledger})


def _time_elsewhere(result: Json, rollout: Rollout) -> float:
    # The agent's own figure, else by the clocks of the session.
    metrics = result.get("agent_metrics")
    stated = stated_number(metrics.get("total_tool_time")) if isinstance(metrics, dict) else None
    if stated is not None:
        return stated
    return max(0.0, rollout.seconds - float(sum(turn["seconds"] for turn in rollout.session["turns"])))
