"""Conversion of a rollout to miles samples, and of these to training data, with columns of the proximal policy.

No column is None: miles infers columns from the first sample.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from harness.adapters.agents import AGENT_RESULT, stamp_stated
from harness.adapters.miles.settings import COMMIT
from harness.adapters.sampling import require_no_masks
from harness.errors import AdapterError
from harness.samples.columns import TRAINER_COLUMNS, trainer_columns, unsampled
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


COLUMNS = tuple(column.trainer_name for column in TRAINER_COLUMNS)


def convert(args: Any, samples: Sequence[Any]) -> Json:
    """Return miles' training data plus `COLUMNS`. Raises `AdapterError` for unsupported options and foreign samples."""
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
    from miles.utils.misc import load_function

    if getattr(args, "use_dynamic_global_batch_size", False):
        raise AdapterError(
            "--use-dynamic-global-batch-size is not supported: convert functions do not receive that size"
        )
    complete_columns(samples)
    rewards = load_function(args.custom_reward_post_process_path)
    data: Json = convert_samples_to_train_data(args, list(samples), {}, None, rewards)
    return data | proximal_columns(samples)


def complete_columns(samples: Sequence[Any]) -> None:
    """Give samples without tokens the columns that others have. Raises `AdapterError` for a step of both kinds."""
    for each in _without(samples, "teacher_log_probs", "give all session servers the same --teacher, or none"):
        each.teacher_log_probs = []
    for each in _without(samples, "rollout_routed_experts", "let every session record them, or none"):
        [rows, *_] = (each for one in samples if (each := getattr(one, "rollout_routed_experts", None)) is not None)
        each.rollout_routed_experts = np.zeros((max(0, len(each.tokens) - 1), *rows.shape[1:]), rows.dtype)


def _without(samples: Sequence[Any], name: str, advice: str) -> list[Any]:
    # miles and slime look at the first sample, and take the column of all of them, or of none.
    told = next((each.index for each in samples if getattr(each, name, None) is not None), None)
    without = [] if told is None else [each for each in samples if getattr(each, name, None) is None]
    if (lacking := next((each.index for each in without if each.response_length), None)) is not None:
        raise AdapterError(
            f"sample {lacking}: expected {name}, as sample {told} has, got none; a step has this column in all samples,"
            f" or in none: {advice}"
        )
    return without


def proximal_columns(samples: Sequence[Any]) -> Json:
    """Return `COLUMNS`. Raises `AdapterError` for foreign or resized samples."""
    columns: Json = {name: [] for name in COLUMNS}
    for sample in samples:
        for name in COLUMNS:
            column = (sample.train_metadata or {}).get(name)
            if column is None or len(column) != sample.response_length:
                raise AdapterError(
                    f"sample {sample.index}: expected {name} of {sample.response_length} tokens in train_metadata, got"
                    f" {'none' if column is None else len(column)}; is it a sample of harness.adapters.miles.Generate?"
                )
            columns[name].append(column)
    return columns
