"""Samples as miles' own generate function reads them: one safetensors blob (radixark/miles 31f1ca96). Pure.

    tokens.N            int64     of sample N, prompt and response
    loss_mask.N         uint8     per response token, as the next one
    rollout_log_probs.N float64
    _samples_meta       uint8     JSON: everything else of the samples, and why there are none

Columns that miles has and sessions have not (routed experts, indexer choices) are named as nulls. Behavior and proximal
columns have no place in it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from harness.samples.delivery import SampleDelivery, cut_response
from harness.samples.versions import NOT_SAMPLED
from harness.types import Json, Sample, SampleStatus, Turn

NO_RECORDS, ALL_TRUNCATED = "no_records", "all_truncated"
"""Why there is no sample: no turn has an output, or not even the prompt fits."""

_NULLS = ["rollout_routed_experts", "rollout_indexer_topk"]


def encode_for_miles(
    samples: Sequence[Sample],
    turns: Sequence[Turn],
    decode: Callable[[Sequence[int]], str],
    *,
    max_seq_len: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> bytes:
    """The blob of a session's `samples`, which were made of `turns`.

    Args:
        samples: In their order.
        turns: Of the session.
        decode: Writes ids as text.
        max_seq_len: Longer samples are cut to so many tokens; one without a response token then is dropped.
        metadata: What the agent returned: goes into every sample's metadata; a numeric `reward` in it is their reward.
    """
    given, by_index = dict(metadata or {}), {turn.index: turn for turn in turns}
    delivery = SampleDelivery(samples)
    kept = [delivery.take(cut) for sample in samples if (cut := cut_sample(sample, max_seq_len)) is not None]
    tensors: dict[str, npt.NDArray[Any]] = {}
    described: list[Json] = []
    for number, sample in enumerate(kept):
        tensors[f"tokens.{number}"] = sample.tokens.astype(np.int64)
        tensors[f"loss_mask.{number}"] = sample.loss_mask.astype(np.uint8)
        tensors[f"rollout_log_probs.{number}"] = sample.rollout_log_probs.astype(np.float64)
        own = [by_index[index] for index in sample.metadata["turns"]]
        described.append(_describe(sample, own, decode, given))
    reason = None if kept else ALL_TRUNCATED if samples else NO_RECORDS
    meta: Json = {"samples": described, "session_metadata": {}, "empty_reason": reason}
    tensors["_samples_meta"] = np.frombuffer(json.dumps(meta, ensure_ascii=False).encode(), np.uint8)
    blob: bytes = safetensors.numpy.save(tensors)
    return blob


def cut_sample(sample: Sample, most: int | None) -> Sample | None:
    """`sample` with at most `most` tokens: TRUNCATED behind its last sampled token that fits; None where none does."""
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
            "cached_tokens": sum(int(turn.notes.get("cached_tokens", 0)) for turn in turns),
            "total_prompt_tokens": sum(turn.prompt_length for turn in turns),
        },
        "metadata": {**given, "harness": dict(sample.metadata)},
        "reward": reward if is_number else None,
        "nulls": _NULLS,
    }
