"""Columns of a sample: one table of dtypes, fill values and names, read by codecs, cuts and trainers' adapters.

A new column is a field of `Sample`, its values in `merge`, and a row here: files, Parquet, and the metadata of miles,
slime, verl and AReaL then have it. What trainers have fields of their own for is written by their adapters.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.samples.versions import NOT_SAMPLED
from harness.types import Sample, SampleStatus, as_ids


class SampleColumn(NamedTuple):
    """Field of `Sample` with one value per response token."""

    name: str
    dtype: str
    """In files: little-endian."""
    fill: float
    """Value where no token was sampled."""
    trainer_name: str = ""
    """Name among the trainer's own fields; empty if the trainer has a field for it."""


COLUMNS = (
    SampleColumn("loss_mask", "|u1", 0),
    SampleColumn("rollout_log_probs", "<f4", 0.0),
    SampleColumn("behavior_versions", "<i4", NOT_SAMPLED, "behavior_versions"),
    SampleColumn("proximal_logprobs", "<f4", 0.0, "proximal_log_probs"),
    SampleColumn("proximal_versions", "<i4", NOT_SAMPLED, "proximal_versions"),
    SampleColumn("returns", "<f4", 0.0),
    SampleColumn("turn_values", "<f4", np.nan),
)

TRAINER_COLUMNS = tuple(column for column in COLUMNS if column.trainer_name)


def cut_columns(sample: Sample, length: int) -> dict[str, Any]:
    """Return the columns of the first `length` response tokens, by field."""
    prompt, rows, masks = sample.tokens.size - sample.response_length, sample.routed_experts, sample.sampling_mask
    columns = {column.name: getattr(sample, column.name)[:length] for column in COLUMNS}
    return columns | {
        "routed_experts": None if rows is None else rows.first(prompt + length),
        "sampling_mask": None if masks is None else masks.part(0, length),
        "teachers": {name: column[:length] for name, column in sample.teachers.items()},
        "teacher_tops": {name: top.part(0, length) for name, top in sample.teacher_tops.items()},
    }


def trainer_columns(sample: Sample) -> dict[str, npt.NDArray[Any]]:
    """Return the columns that trainers have no field for, by `trainer_name`, as long as the response."""
    return {column.trainer_name: getattr(sample, column.name) for column in TRAINER_COLUMNS}


def unsampled(prompt: Sequence[int], response: Sequence[int]) -> Sample:
    """Return a sample whose response no policy sampled."""
    columns: dict[str, Any] = {each.name: np.full(len(response), each.fill, each.dtype) for each in COLUMNS}
    tokens = as_ids([*prompt, *response])
    return Sample(tokens, len(response), status=SampleStatus.ABORTED, weight_versions=(), **columns)
