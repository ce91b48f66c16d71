"""Samples on disk come back as they were, and a damaged file says where."""

import json
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import RunError
from harness.samples.codec import (
    read_samples,
    sample_from_binary,
    sample_from_json,
    sample_to_binary,
    sample_to_json,
    write_parquet,
    write_samples,
)
from harness.top_logprobs import TopLogprobs
from harness.types import Sample, SampleStatus, as_ids, as_logprobs
from tests.builders import sample

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
    length = draw(st.integers(0, 12))

    def column(values):
        return draw(st.lists(values, min_size=length, max_size=length))

    return sample(
        tokens=as_ids(draw(st.lists(IDS, max_size=5)) + column(IDS)),
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
        reward=draw(st.none() | st.floats(allow_nan=False)),
        index=draw(st.none() | st.integers(0, 10**6)),
        group_index=draw(st.none() | st.integers(0, 10**6)),
        teachers={name: as_logprobs(column(FLOATS | st.just(np.nan))) for name in draw(st.sets(TEXT, max_size=2))},
        teacher_tops={
            name: TopLogprobs(*(np.repeat(as_row(column(values))[:, None], k, axis=1) for as_row, values in TOPS))
            for name, k in draw(st.dictionaries(TEXT, st.integers(1, 3), max_size=2)).items()
        },
    )


def bits(of: Sample):
    """Every value of a sample, token columns down to the bit."""
    names = ("tokens", "loss_mask", "rollout_log_probs", "behavior_versions", "proximal_logprobs", "proximal_versions")
    columns = [(getattr(of, name).dtype.str, getattr(of, name).tobytes()) for name in names]
    columns += [(name, column.tobytes()) for name, column in sorted(of.teachers.items())]
    columns += [(name, top.to_plain()) for name, top in sorted(of.teacher_tops.items())]
    rest = [of.response_length, of.status, of.weight_versions, of.repeat_terminated, of.metadata, of.reward]
    return columns, [*rest, of.index, of.group_index]


@given(samples())
def test_the_binary_form_keeps_every_bit(original):
    wire = msgspec.msgpack.encode(sample_to_binary(original))

    assert bits(sample_from_binary(msgspec.msgpack.decode(wire))) == bits(original)


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


@given(samples())
def test_a_sample_survives_json_to_the_bit(original):
    """float32 values are written with enough digits to come back as themselves."""
    assert bits(sample_from_json(json.loads(json.dumps(sample_to_json(original))))) == bits(original)


@pytest.mark.parametrize("raw", [0x3DCCCCCD, 0x00000001, 0x7F7FFFFF, 0xBF7FFFFF, 0x80000000, 0x33800001])
def test_every_float32_is_written_exactly(raw):
    """Subnormals, the largest value, negative zero and values without a short decimal form."""
    value = np.frombuffer(struct.pack("<I", raw), dtype="<f4")

    read = sample_from_json(json.loads(json.dumps(sample_to_json(sample(rollout_log_probs=as_logprobs(value))))))

    assert read.rollout_log_probs.tobytes() == value.tobytes()


@given(st.lists(samples(), max_size=4))
def test_json_lines_hold_one_sample_per_line(tmp_path_factory, originals):
    path = tmp_path_factory.mktemp("lines") / "samples.jsonl"

    write_samples(originals, path)

    assert path.read_bytes().count(b"\n") == len(originals)
    assert [bits(read) for read in read_samples(path)] == [bits(original) for original in originals]


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


def test_parquet_says_the_same_as_json_lines(tmp_path):
    """Both files of a run describe the same samples, column by column."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the parquet extra")
    originals = [
        sample(metadata={"task": 1, "turns": [0, 1]}, reward=0.5, index=3, group_index=1),
        sample(tokens=as_ids([5]), response_length=0, **{name: as_ids([]) for name in ("behavior_versions",)}),
        sample(status=SampleStatus.ABORTED, rollout_log_probs=as_logprobs([-1e-30, -3.3])),
        sample(
            teacher_tops={"big": TopLogprobs(np.array([[5, -1]], np.int32), np.array([[-0.5, np.nan]], np.float32))}
        ),
    ]
    write_samples(originals, tmp_path / "samples.jsonl")
    write_parquet(originals, tmp_path / "samples.parquet")

    rows = parquet.read_table(tmp_path / "samples.parquet").to_pylist()

    read = [sample_from_json(row | {"metadata": json.loads(row["metadata"])}) for row in rows]
    assert [bits(each) for each in read] == [bits(each) for each in read_samples(tmp_path / "samples.jsonl")]
