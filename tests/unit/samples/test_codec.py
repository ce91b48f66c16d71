"""Samples on disk come back as they were, and a damaged file says where."""

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import RunError
from harness.samples.codec import (
    read_samples,
    sample_from_binary,
    sample_from_json,
    sample_to_binary,
    sample_to_json,
    samples_from_tensors,
    samples_to_tensors,
    write_parquet,
    write_samples,
)
from harness.samples.columns import COLUMNS
from harness.sampling_masks import SampleMasks
from harness.token_rows import RowState, SampleRows
from harness.top_logprobs import TopLogprobs
from harness.types import Sample, SampleStatus, as_ids, as_logprobs
from tests.builders import sample
from tests.thoroughness import examples

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
IDS = st.integers(0, 2**31 - 1)
TOPS = ((as_ids, IDS | st.just(-1)), (as_logprobs, FLOATS | st.just(np.nan)))
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def samples(draw) -> Sample:
    """Any sample whose columns fit together."""
    prompt, length = draw(st.integers(0, 5)), draw(st.integers(0, 12))

    def column_of(values):
        return st.lists(values, min_size=length, max_size=length)

    def column(values):
        return draw(column_of(values))

    return sample(
        tokens=as_ids(draw(st.lists(IDS, min_size=prompt, max_size=prompt)) + column(IDS)),
        response_length=length,
        loss_mask=np.asarray(column(st.integers(0, 1)), dtype=np.uint8),
        rollout_log_probs=as_logprobs(column(FLOATS)),
        status=draw(st.sampled_from(list(SampleStatus))),
        weight_versions=tuple(draw(st.lists(TEXT, max_size=3))),
        behavior_versions=as_ids(column(st.integers(-1, 1_000))),
        proximal_logprobs=as_logprobs(column(FLOATS)),
        proximal_versions=as_ids(column(st.integers(-1, 1_000))),
        repeat_terminated=draw(st.integers(0, 1)),
        metadata=draw(st.dictionaries(TEXT, JSON, max_size=4)),
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        index=draw(st.none() | st.integers(0, 10**6)),
        group_index=draw(st.none() | st.integers(0, 10**6)),
        teachers={name: as_logprobs(column(FLOATS | st.just(np.nan))) for name in draw(st.sets(TEXT, max_size=2))},
        teacher_tops={
            name: TopLogprobs(*(np.repeat(as_row(column(values))[:, None], k, axis=1) for as_row, values in TOPS))
            for name, k in draw(st.dictionaries(TEXT, st.integers(1, 3), max_size=2)).items()
        },
        turn_rewards=tuple(draw(st.lists(st.none() | FLOATS, max_size=3))),
        returns=as_logprobs(draw(st.just([]) | st.just([0.5] * length))),
        turn_values=as_logprobs(draw(st.just([]) | st.just([np.nan] * length))),
        routed_experts=draw(
            st.none() | st.builds(rows, st.just(prompt + length), st.sampled_from((np.uint8, np.uint16)))
        ),
        sampling_mask=draw(st.none() | st.builds(masks, column_of(st.lists(IDS, max_size=3)))),
    )


def rows(tokens: int, dtype) -> SampleRows:
    """Experts of two layers, which the last token lacks."""
    states = np.full(tokens, RowState.PRESENT, np.uint8)
    states[-1:] = RowState.NOT_READ
    return SampleRows(np.arange(tokens * 4, dtype=dtype).reshape(tokens, 2, 2), states)


def masks(candidates: list[list[int]]) -> SampleMasks:
    """One mask for each response token."""
    offsets = np.cumsum([0, *map(len, candidates)], dtype=np.int32)
    return SampleMasks(as_ids([i for each in candidates for i in each]), offsets, np.ones(len(candidates), np.uint8))


def bits(of: Sample):
    """Every value of a sample, token columns down to the bit."""
    arrays = [(name, getattr(of, name)) for name in ("tokens", *(each.name for each in COLUMNS))]
    arrays += [*sorted(of.teachers.items()), ("returns", of.returns), ("turn_values", of.turn_values)]
    columns = [(name, array.dtype.str, array.tobytes()) for name, array in arrays]
    plain = [each and each.to_plain() for each in (of.routed_experts, of.sampling_mask)]
    plain += [(name, top.to_plain()) for name, top in sorted(of.teacher_tops.items())]
    rest = [of.response_length, of.status, of.weight_versions, of.repeat_terminated, of.metadata, of.reward, of.weight]
    return columns, plain, [*rest, of.index, of.group_index, of.turn_rewards]


def through_lines(originals: list[Sample], path: Path) -> list[Sample]:
    write_samples(originals, path)
    assert path.read_bytes().count(b"\n") == len(originals)
    return list(read_samples(path))


def through_parquet(originals: list[Sample], path: Path) -> list[Sample]:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the parquet extra")
    write_parquet(originals, path)
    read = parquet.read_table(path).to_pylist(maps_as_pydicts="strict")
    return [sample_from_json(row | {"metadata": json.loads(row["metadata"])}) for row in read]


FORMS: dict[str, Callable[[list[Sample], Path], Iterable[Sample]]] = {
    "JSON": lambda originals, _: [sample_from_json(json.loads(json.dumps(sample_to_json(each)))) for each in originals],
    "binary": lambda originals, _: map(
        sample_from_binary, msgspec.msgpack.decode(msgspec.msgpack.encode([*map(sample_to_binary, originals)]))
    ),
    "tensors": lambda originals, _: samples_from_tensors(samples_to_tensors(originals, {}))[0],
    "lines": through_lines,
    "parquet": through_parquet,
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(60), deadline=None)
@given(originals=st.lists(samples(), max_size=4))
def test_every_form_keeps_every_bit(tmp_path_factory, form, originals):
    """float32 values of JSON are written with enough digits; JSON Lines hold one sample per line."""
    read = FORMS[form](originals, tmp_path_factory.mktemp("samples") / "samples")

    assert [bits(each) for each in read] == [bits(each) for each in originals]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": b"123"}, "tokens"),
        ({"tokens": [1]}, "tokens"),
        ({"metadata": "{"}, "metadata"),
        ({"metadata": {}}, "metadata"),
        ({"status": "excellent"}, "status"),
    ],
)
def test_a_binary_form_that_is_none_names_the_field(change, message):
    with pytest.raises(RunError, match=f"not a sample: {message}"):
        sample_from_binary(sample_to_binary(sample()) | change)


@pytest.mark.parametrize("raw", [0x3DCCCCCD, 0x00000001, 0x7F7FFFFF, 0xBF7FFFFF, 0x80000000, 0x33800001])
def test_every_float32_is_written_exactly(raw):
    """Subnormals, the largest value, negative zero and values without a short decimal form."""
    value = np.frombuffer(struct.pack("<I", raw), dtype="<f4")

    read = sample_from_json(json.loads(json.dumps(sample_to_json(sample(rollout_log_probs=as_logprobs(value))))))

    assert read.rollout_log_probs.tobytes() == value.tobytes()


def test_a_torn_last_line_is_an_error_that_names_it(tmp_path):
    """A writer that was killed leaves a part of a line, and of a character: it is not taken for the end of the file."""
    path = tmp_path / "samples.jsonl"
    write_samples([sample(), sample(metadata={"text": "naïve ünïcödé " * 3})], path)
    whole = path.read_bytes()
    for end in range(whole.index(b"\n") + 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(RunError, match=r"samples\.jsonl:2: "):
            read_samples(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", None),
        ("tokens", ["x"]),
        ("tokens", [2**40]),
        ("response_length", "many"),
        ("status", "excellent"),
        ("weight_versions", 3),
        ("loss_mask", {}),
    ],
)
def test_a_field_that_is_wrong_is_named(field, value):
    with pytest.raises(RunError, match=field):
        sample_from_json(sample_to_json(sample()) | {field: value})


@pytest.mark.parametrize("other", [None, [], "sample", 7, {}])
def test_something_else_is_not_a_sample(other):
    with pytest.raises(RunError, match="not a sample"):
        sample_from_json(other)
