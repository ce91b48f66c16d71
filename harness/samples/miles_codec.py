"""Samples as a safetensors blob for miles' generate function (radixark/miles 31f1ca96). Pure.

    tokens.N            int64     prompt and response of sample N
    loss_mask.N         uint8     per response token, as is the next one
    rollout_log_probs.N float64
    rollout_routed_experts.N int32  of all tokens but the last, if recorded
    _samples_meta       uint8     JSON: all other fields

Columns of behavior, proximal policies and teachers are lost.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import MalformedRequest
from harness.samples.delivery import SampleDelivery, cut_response
from harness.samples.versions import NOT_SAMPLED
from harness.types import Json, Sample, SampleStatus, Turn

NO_RECORDS, ALL_TRUNCATED = "no_records", "all_truncated"
"""Reasons for no samples: no output, or no prompt fits."""

_EXPERTS, _INDEXER = "rollout_routed_experts", "rollout_indexer_topk"


def encode_for_miles(
    samples: Sequence[Sample],
    turns: Sequence[Turn],
    decode: Callable[[Sequence[int]], str],
    *,
    max_seq_len: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> bytes:
    """Encode a session's `samples`, built from `turns`, in order.

    Samples are cut to `max_seq_len` and dropped if no response is left. `metadata`, the agent's result, is added to
    each; a numeric `reward` becomes its reward.
    """
    import safetensors.numpy

    given, by_index = dict(metadata or {}), {turn.index: turn for turn in turns}
    delivery = SampleDelivery(samples)
    kept = [delivery.take(cut) for sample in samples if (cut := cut_sample(sample, max_seq_len)) is not None]
    tensors: dict[str, npt.NDArray[Any]] = {}
    described: list[Json] = []
    for number, sample in enumerate(kept):
        if sample.sampling_mask is not None:
            raise MalformedRequest(
                "record: expected no sampling_mask in sessions for miles, which normalizes over the whole vocabulary",
                param="record",
            )
        tensors[f"tokens.{number}"] = sample.tokens.astype(np.int64)
        tensors[f"loss_mask.{number}"] = sample.loss_mask.astype(np.uint8)
        tensors[f"rollout_log_probs.{number}"] = sample.rollout_log_probs.astype(np.float64)
        experts = require_experts(sample, np.int32)
        if experts is not None:
            tensors[f"{_EXPERTS}.{number}"] = experts
        own = [by_index[index] for index in sample.metadata["turns"]]
        described.append(_describe(sample, own, decode, given))
    reason = None if kept else ALL_TRUNCATED if samples else NO_RECORDS
    meta: Json = {"samples": described, "session_metadata": {}, "empty_reason": reason}
    tensors["_samples_meta"] = np.frombuffer(json.dumps(meta, ensure_ascii=False).encode(), np.uint8)
    blob: bytes = safetensors.numpy.save(tensors)
    return blob


def require_experts(sample: Sample, dtype: npt.DTypeLike) -> npt.NDArray[Any] | None:
    """Return the experts of all tokens but the last, shape [tokens - 1, layers, top_k]; None if not recorded.

    Raises `MalformedRequest` if rows are missing: trainers would route those tokens to experts that no model chose.
    """
    rows = sample.routed_experts
    if rows is None:
        return None
    if rows.missing:
        raise MalformedRequest(
            f"missing_rows: expected require for routed experts for a trainer, which cannot mask a row; this sample"
            f" lacks {rows.missing}",
            param="missing_rows",
        )
    return rows.values[:-1].astype(dtype)


def cut_sample(sample: Sample, most: int | None) -> Sample | None:
    """Cut `sample` to `most` tokens, TRUNCATED after the last sampled one. Return None if none fits."""
    if most is None or sample.tokens.size <= most:
        return sample
    start = sample.tokens.size - sample.response_length
    sampled = np.flatnonzero(sample.behavior_versions[: max(0, most - start)] != NOT_SAMPLED)
    if not sampled.size:
        return None
    return replace(cut_response(sample, int(sampled[-1]) + 1), status=SampleStatus.TRUNCATED)


def _describe(sample: Sample, turns: Sequence[Turn], decode: Callable[[Sequence[int]], str], given: Json) -> Json:
    reward = given.get("reward")
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    return {
        "response": decode(sample.tokens[sample.tokens.size - sample.response_length :].tolist()),
        "response_length": sample.response_length,
        "status": sample.status.value,
        "weight_versions": list(sample.weight_versions),
        "prefix_cache_info": {
            "cached_tokens": sum(turn.notes.cached_tokens or 0 for turn in turns),
            "total_prompt_tokens": sum(turn.prompt_length for turn in turns),
        },
        "metadata": {**given, "harness": dict(sample.metadata)},
        "reward": reward if is_number else None,
        "nulls": [_INDEXER] if sample.routed_experts is not None else [_EXPERTS, _INDEXER],
    }
