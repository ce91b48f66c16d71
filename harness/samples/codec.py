"""Sample codecs: JSON, JSON Lines, Parquet, and two binary forms for passing samples between programs.

Round trips are exact in every column. Parquet has one row per sample, list columns, and metadata as JSON text.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import isnan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.decoding import read_json
from harness.errors import RunError
from harness.samples.columns import COLUMNS
from harness.sampling_masks import SampleMasks
from harness.token_rows import SampleRows
from harness.top_logprobs import TopLogprobs
from harness.types import Json, Logprobs, Sample, SampleStatus, as_ids, as_logprobs

_SAMPLES_IN_ROW_GROUP = 64

_COLUMNS: Mapping[str, str] = {"tokens": "<i4"} | {column.name: column.dtype for column in COLUMNS}
"""Per-token columns with their binary dtypes."""

_OPTIONAL = frozenset(
    {"weight", "turn_rewards", "returns", "turn_values", "routed_experts", "sampling_mask", "teachers", "teacher_tops"}
)
"""Fields that older files lack."""


def sample_to_json(sample: Sample) -> Json:
    """Return all fields, with arrays as lists; rows of several values are base64, missing values and logprobs None."""
    columns = {name: getattr(sample, name).tolist() for name in _COLUMNS}
    columns["turn_values"] = _with_none(sample.turn_values)
    text = {name: _with_base64(rows) for name, rows in _plain_rows(sample).items()}
    if sample.teachers:
        text["teachers"] = {name: _with_none(column) for name, column in sample.teachers.items()}
    if sample.teacher_tops:
        text["teacher_tops"] = {name: _with_base64(top) for name, top in _plain_tops(sample).items()}
    return columns | _plain_fields(sample) | text | {"metadata": dict(sample.metadata)}


def sample_to_binary(sample: Sample) -> Json:
    """Return all fields for msgpack: arrays as little-endian bytes, metadata as JSON text."""
    columns = {name: getattr(sample, name).astype(dtype, copy=False).tobytes() for name, dtype in _COLUMNS.items()}
    binary = _plain_rows(sample)
    if sample.teachers:
        binary["teachers"] = {
            name: column.astype("<f4", copy=False).tobytes() for name, column in sample.teachers.items()
        }
    if sample.teacher_tops:
        binary["teacher_tops"] = _plain_tops(sample)
    return columns | _plain_fields(sample) | binary | {"metadata": json.dumps(dict(sample.metadata))}


def sample_from_binary(obj: Json) -> Sample:
    """Decode `sample_to_binary`. Raises `RunError` naming the bad field."""
    if not isinstance(obj, dict):
        raise RunError(f"not a sample: expected an object, got {type(obj).__name__}")
    columns = {
        name: _read(obj, name, partial(np.frombuffer, dtype=dtype)) for name, dtype in _COLUMNS.items() if name in obj
    }
    return sample_from_json(obj | columns | {"metadata": _read(obj, "metadata", json.loads)})


def samples_to_tensors(samples: Sequence[Sample], about: Json) -> bytes:
    """Encode `samples` and the JSON object `about` as one safetensors blob.

    Column `NAME` of sample N is the tensor `NAME.N`; `routed_experts.N` has its states in `routed_experts_states.N`,
    masks are `sampling_mask_values.N`, `_offsets` and `_states`, a teacher's logprobs `teachers.N.NAME` and its most
    likely tokens `teacher_top_ids.N.NAME` and `_logprobs`. All else is the uint8 tensor `about`: JSON text.
    """
    import safetensors.numpy

    others = [_plain_fields(sample) | {"metadata": dict(sample.metadata)} for sample in samples]
    text = msgspec.json.encode({**about, "samples": others})
    tensors = {
        f"{name}.{number}": getattr(sample, name).astype(dtype, copy=False)
        for name, dtype in _COLUMNS.items()
        for number, sample in enumerate(samples)
    }
    for number, sample in enumerate(samples):
        if (rows := sample.routed_experts) is not None:
            tensors |= {f"routed_experts.{number}": rows.values, f"routed_experts_states.{number}": rows.states}
        tensors |= {f"teachers.{number}.{name}": column for name, column in sample.teachers.items()}
        for name, top in sample.teacher_tops.items():
            tensors |= {f"teacher_top_{part}.{number}.{name}": getattr(top, part) for part in _TOP_PARTS}
        if (masks := sample.sampling_mask) is not None:
            tensors |= {f"sampling_mask_{part}.{number}": getattr(masks, part) for part in _MASK_PARTS}
    blob: bytes = safetensors.numpy.save({**tensors, "about": np.frombuffer(text, np.uint8)})
    return blob


def samples_from_tensors(blob: bytes) -> tuple[list[Sample], Json]:
    """Decode `samples_to_tensors`. Raises `RunError`."""
    import safetensors.numpy

    try:
        tensors = safetensors.numpy.load(blob)
        about = read_json(tensors["about"].data, Json)
        samples = [
            sample_from_json(
                others
                | {name: tensors[at] for name in _COLUMNS if (at := f"{name}.{number}") in tensors}
                | _rows_in(tensors, number)
                | _teachers_in(tensors, number)
            )
            for number, others in enumerate(about.pop("samples"))
        ]
    except (safetensors.SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise RunError(f"not samples: {type(error).__name__} {error}") from error
    return samples, about


def sample_from_json(obj: Json) -> Sample:
    """Decode `sample_to_json`. Raises `RunError` naming the bad field."""
    if not isinstance(obj, dict):
        raise RunError(f"not a sample: expected a JSON object, got {type(obj).__name__}")
    present = {name: as_field for name, as_field in _FIELDS.items() if name in obj or name not in _OPTIONAL}
    return Sample(**{name: _read(obj, name, as_field) for name, as_field in present.items()})


def write_samples(samples: Iterable[Sample], path: Path) -> None:
    """Write JSON Lines to `path`."""
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(sample_to_json(sample), ensure_ascii=False) + "\n")


def read_samples(path: Path) -> list[Sample]:
    """Read what `write_samples` wrote. Raises `RunError` naming a damaged line."""
    samples: list[Sample] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                samples.append(sample_from_json(json.loads(line)))
            except (ValueError, RunError) as error:
                raise RunError(f"{path}:{number}: {error}") from error
    return samples


def write_parquet(samples: Iterable[Sample], path: Path) -> None:
    """Write one row per sample to `path`. Needs the `parquet` extra."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: pa.list_(pa.from_numpy_dtype(np.dtype(dtype))) for name, dtype in _COLUMNS.items()}
    schema = pa.schema(
        columns
        | {
            "response_length": pa.int64(),
            "status": pa.string(),
            "weight_versions": pa.list_(pa.string()),
            "repeat_terminated": pa.int64(),
            "metadata": pa.string(),
            "reward": pa.float64(),
            "index": pa.int64(),
            "group_index": pa.int64(),
            "weight": pa.float64(),
            "turn_rewards": pa.list_(pa.float64()),
            "teachers": pa.map_(pa.string(), pa.list_(pa.float32())),
            "teacher_tops": pa.map_(
                pa.string(), pa.struct({"k": pa.int64(), "ids": pa.binary(), "logprobs": pa.binary()})
            ),
            "routed_experts": pa.struct(
                {"dtype": pa.string(), "shape": pa.list_(pa.int64()), "values": pa.binary(), "states": pa.binary()}
            ),
            "sampling_mask": pa.struct(
                {"dtype": pa.string(), "values": pa.binary(), "offsets": pa.binary(), "states": pa.binary()}
            ),
        }
    )
    waiting = iter(samples)
    with pq.ParquetWriter(path, schema) as writer:
        # Row groups bound the memory: `samples` may be an iterator over more samples than fit.
        while group := list(islice(waiting, _SAMPLES_IN_ROW_GROUP)):
            bare = (replace(each, routed_experts=None, sampling_mask=None, teacher_tops={}) for each in group)
            rows = [sample_to_json(sample) for sample in bare]
            for row, sample in zip(rows, group, strict=True):
                row["metadata"] = json.dumps(row["metadata"], ensure_ascii=False)
                row.update(_plain_rows(sample))
                row["teachers"] = list(row.get("teachers", {}).items())
                row["teacher_tops"] = list(_plain_tops(sample).items())
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def _plain_fields(sample: Sample) -> Json:
    return {
        "response_length": sample.response_length,
        "status": str(sample.status),
        "weight_versions": list(sample.weight_versions),
        "repeat_terminated": sample.repeat_terminated,
        "reward": sample.reward,
        "index": sample.index,
        "group_index": sample.group_index,
        "weight": sample.weight,
        "turn_rewards": list(sample.turn_rewards),
    }


_MASK_PARTS = ("values", "offsets", "states")
_TOP_PARTS = ("ids", "logprobs")


def _plain_rows(sample: Sample) -> Json:
    kinds = {"routed_experts": sample.routed_experts, "sampling_mask": sample.sampling_mask}
    return {name: rows.to_plain() for name, rows in kinds.items() if rows is not None}


def _plain_tops(sample: Sample) -> Json:
    return {name: top.to_plain() for name, top in sample.teacher_tops.items()}


def _with_base64(plain: Json) -> Json:
    return {name: b64encode(value).decode() if isinstance(value, bytes) else value for name, value in plain.items()}


def _with_none(column: Logprobs) -> list[float | None]:
    return [None if isnan(value) else value for value in column.tolist()]


def _teachers_in(tensors: Mapping[str, Any], number: int) -> Json:
    def named(column: str) -> dict[str, Any]:
        prefix = f"{column}.{number}."
        return {at.removeprefix(prefix): values for at, values in tensors.items() if at.startswith(prefix)}

    ids, logprobs = (named(f"teacher_top_{part}") for part in _TOP_PARTS)
    tops = {name: TopLogprobs(ids[name], logprobs[name]) for name in ids}
    found = {"teachers": named("teachers"), "teacher_tops": tops}
    return {name: values for name, values in found.items() if values}


def _by_teacher(as_column: Callable[[Any], object], value: Any) -> Mapping[str, object]:
    return {str(name): as_column(column) for name, column in dict(value or {}).items()}


def _as_top(value: Any) -> TopLogprobs:
    if isinstance(value, TopLogprobs):
        return value
    parts = (value[part] for part in _TOP_PARTS)
    ids, logprobs = (b64decode(part, validate=True) if isinstance(part, str) else part for part in parts)
    return TopLogprobs.from_plain(value["k"], ids, logprobs)


def _as_teacher(column: Any) -> Logprobs:
    if isinstance(column, bytes):
        return as_logprobs(np.frombuffer(column, "<f4"))
    return as_logprobs(np.asarray(column, np.float32))  # None becomes NaN


def _rows_in(tensors: Mapping[str, Any], number: int) -> Json:
    values, states = (tensors.get(f"{name}.{number}") for name in ("routed_experts", "routed_experts_states"))
    rows: Json = {} if values is None or states is None else {"routed_experts": SampleRows(values, states)}
    masks = {part: tensors[at] for part in _MASK_PARTS if (at := f"sampling_mask_{part}.{number}") in tensors}
    return rows | ({"sampling_mask": SampleMasks(**masks)} if masks else {})


def _as_rows(kind: type[SampleRows] | type[SampleMasks], value: Any) -> SampleRows | SampleMasks | None:
    if value is None or isinstance(value, kind):
        return value
    plain: Json = {
        name: b64decode(each, validate=True) if name in _MASK_PARTS and isinstance(each, str) else each
        for name, each in value.items()
    }
    return kind.from_plain(**plain)


def _read(obj: Json, name: str, as_field: Callable[[Any], object]) -> Any:
    try:
        return as_field(obj[name])
    except KeyError:
        raise RunError(f"not a sample: {name} is missing") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise RunError(f"not a sample: {name}: {error}") from error


def _as_it_is(value: Any) -> Any:
    return value


_ARRAYS: Mapping[str, Callable[[Any], object]] = {
    "<i4": as_ids,
    "<f4": as_logprobs,
    "|u1": partial(np.asarray, dtype=np.uint8),
}

_FIELDS: Mapping[str, Callable[[Any], object]] = {name: _ARRAYS[dtype] for name, dtype in _COLUMNS.items()} | {
    "response_length": int,
    "status": SampleStatus,
    "weight_versions": tuple,
    "repeat_terminated": int,
    "metadata": dict,
    "reward": _as_it_is,
    "index": _as_it_is,
    "group_index": _as_it_is,
    "weight": float,
    "turn_rewards": tuple,
    "routed_experts": partial(_as_rows, SampleRows),
    "sampling_mask": partial(_as_rows, SampleMasks),
    "teachers": partial(_by_teacher, _as_teacher),
    "teacher_tops": partial(_by_teacher, _as_top),
}
