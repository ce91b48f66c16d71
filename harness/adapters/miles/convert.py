"""Training columns: miles' own, plus the proximal policy's, as long as each response."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.errors import AdapterError
from harness.samples.columns import TRAINER_COLUMNS
from harness.types import Json

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
