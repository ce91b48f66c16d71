"""AReaL trajectory columns and generation settings. Pure."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.adapters.sampling import require_no_masks, require_no_teachers, require_unfiltered
from harness.errors import AdapterError
from harness.samples.columns import TRAINER_COLUMNS
from harness.samples.versions import NOT_SAMPLED, count_versions
from harness.types import Json, Sample

Columns = Mapping[str, npt.NDArray[Any]]

_EXTRA = tuple(column for column in TRAINER_COLUMNS if column.name != "behavior_versions")  # those are `versions` there

_ALL_TOKENS = 10**8
"""AReaL's `top_k` that keeps every token."""


def trajectory_columns(sample: Sample, reward: float, version: int) -> Columns:
    """Return columns of shape [tokens]; [] for reward and guard signal. AReaL's `version` replaces odd labels."""
    require_no_masks(sample, "AReaL")
    require_no_teachers(sample, "AReaL")
    prompt = len(sample.tokens) - sample.response_length

    def whole(column: npt.NDArray[Any], value: float, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.concatenate([np.full(prompt, value, dtype), column.astype(dtype)])

    # Each column has a value at its own token: AReaL shifts them. A token that no policy sampled has mask 0, logprob 0
    # and version -1.
    versions = count_versions(sample, version)
    return {
        "input_ids": np.array(sample.tokens, dtype=np.int32),
        "attention_mask": np.ones(len(sample.tokens), dtype=np.bool_),
        "loss_mask": whole(sample.loss_mask, 0, np.int32),
        "logprobs": whole(sample.rollout_log_probs, 0, np.float32),
        "versions": whole(versions.behavior, NOT_SAMPLED, np.int32),
        **{each.name: whole(getattr(sample, each.name), each.fill, np.dtype(each.dtype)) for each in _EXTRA},
        "proximal_versions": whole(versions.proximal, NOT_SAMPLED, np.int32),
        "rewards": np.array(reward, dtype=np.float32),
        "repeat_terminated": np.array(sample.repeat_terminated, dtype=np.int32),
    }


def sglang_params(gconfig: Any) -> Json:
    """Convert `GenerationHyperparameters` to SGLang's names. Raises `AdapterError` for unsupported parameters."""
    # `n_samples` is ignored: AReaL calls once for each.
    for name, kept in [("frequency_penalty", 0.0), ("use_beam_search", False), ("ignore_eos", False)]:
        if getattr(gconfig, name) != kept:
            raise AdapterError(f"gconfig.{name}={getattr(gconfig, name)!r} is not supported; expected {kept!r}")
    params: Json = {
        "max_new_tokens": gconfig.max_new_tokens,
        "min_new_tokens": gconfig.min_new_tokens,
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": -1 if gconfig.top_k >= _ALL_TOKENS else gconfig.top_k,
        "stop": gconfig.stop or None,
        "stop_token_ids": gconfig.stop_token_ids or None,
    }
    require_unfiltered(params, "gconfig.")
    return params
