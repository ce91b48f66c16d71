"""Segments: what they take from a sample, what they refuse, and what becomes of those that are too long."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import SegmentError
from harness.samples.segments import COLUMNS, LostTokens, Segment, TooLong, fit_segment
from harness.types import as_ids, as_logprobs
from tests.builders import sample
from tests.unit.samples.some_segments import segment

LISTS: dict[str, Any] = {
    "ids": [5, 6, 7],
    "loss_mask": [0, 1, 0],
    "advantages": [0.0, 0.5, 0.0],
    "behavior_logprobs": [0.0, -1.0, -2.0],
    "proximal_logprobs": [0.0, -1.5, -2.0],
    "behavior_versions": [-1, 3, 3],
    "proximal_versions": [-1, 4, 3],
}


def test_a_segment_is_the_whole_sample():
    """Every token, the prompt as context, and the columns of the response as they were."""
    given_sample = sample(
        loss_mask=np.asarray([1, 0], dtype=np.uint8),
        proximal_logprobs=as_logprobs([-0.5, -2.0]),
        proximal_versions=as_ids([1, 0]),
    )

    made = Segment.of_sample(given_sample)

    assert made.ids.tolist() == given_sample.tokens.tolist()
    assert made.loss_mask.tolist() == [0, 0, 0, 1, 0]
    assert made.advantages.tolist() == [0.0] * 5
    assert made.behavior_logprobs.tobytes() == as_logprobs([0, 0, 0, -0.1, -2.0]).tobytes()
    assert made.proximal_logprobs.tolist() == [0, 0, 0, -0.5, -2.0]
    assert made.behavior_versions.tolist() == [-1, -1, -1, 0, 0]
    assert made.proximal_versions.tolist() == [-1, -1, -1, 1, 0]


def test_columns_have_their_dtypes_and_are_read_only():
    """From lists as well: a learner hands them to its framework as they are."""
    made = Segment(**LISTS)
    dtypes = {name: str(getattr(made, name).dtype) for name in COLUMNS}
    assert dtypes == {
        "ids": "int32",
        "loss_mask": "uint8",
        "advantages": "float32",
        "behavior_logprobs": "float32",
        "proximal_logprobs": "float32",
        "behavior_versions": "int32",
        "proximal_versions": "int32",
    }
    assert not any(getattr(made, name).flags.writeable for name in COLUMNS)


def test_an_advantage_stands_on_the_tokens_to_train():
    """On the others it is 0, so a sum over all tokens is the sum over the trained ones."""
    made = Segment(**LISTS).with_advantage(-0.5)
    assert made.advantages.tolist() == [0.0, -0.5, 0.0]
    assert made.behavior_logprobs.tolist() == LISTS["behavior_logprobs"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"advantages": [0.0, 0.5]}, "advantages has 2 values for 3 tokens"),
        ({"loss_mask": [0, 1, 0, 0]}, "loss_mask has 4 values for 3 tokens"),
        ({"loss_mask": [1, 1, 0]}, "the first token is to be trained"),
        ({"loss_mask": [0, 2, 0]}, "loss_mask: expected 0 and 1, got 2"),
        ({"loss_mask": [0, -1, 0]}, "loss_mask holds int64 values that uint8 cannot hold"),
        ({"ids": [5, 2**40, 7]}, "ids holds int64 values that int32 cannot hold"),
        ({"ids": [5, 6.5, 7]}, "ids holds float64 values that int32 cannot hold"),
        ({"ids": ["a", "b", "c"]}, "ids is no column of int32"),
        ({"ids": [[5, 6, 7]]}, r"ids has the shape \[1, 3\]; expected one value per token$"),
        ({"ids": [5, [6], 7]}, "ids is no column of int32"),
        ({"advantages": [0.0, float("nan"), 0.0]}, "advantages is not finite at token 1"),
        ({"advantages": [0.0, 1e300, 0.0]}, "advantages is not finite at token 1"),
        ({"advantages": None}, "advantages"),
        ({"behavior_logprobs": [0.0, -1.0, float("-inf")]}, "behavior_logprobs is not finite at token 2"),
        ({"proximal_versions": [-1, 5, 3]}, "token 1 has behavior version 3"),
        ({"proximal_versions": [0, 4, 3]}, "token 0 has behavior version -1"),
        ({"proximal_logprobs": [0.0, -1.5, -2.5]}, r"token 2 .*, logprob -2\.0, .* 3, logprob -2\.5; expected"),
        ({name: [] for name in COLUMNS}, "at least one token"),
    ],
)
def test_a_segment_that_cannot_be_trained_is_refused(changed: dict[str, Any], message: str):
    """The error names the column, and the place where there is one."""
    with pytest.raises(SegmentError, match=message):
        Segment(**LISTS | changed)


def test_a_segment_of_the_length_of_a_pack_is_not_too_long():
    exact = segment(7)
    for choice in TooLong:
        assert fit_segment(exact, 7, choice) == (exact, LostTokens())


def test_too_long_is_an_error_that_says_what_to_do():
    with pytest.raises(SegmentError, match=r'8 tokens is longer than packing_length, which is 7.*"drop" or "cut"'):
        fit_segment(segment(8), 7, TooLong.ERROR)


def test_a_cut_counts_each_token_that_it_loses():
    """By what the ledger had counted it as: trained, masked, appended by an encoder, context."""
    long = Segment(
        ids=range(8),
        loss_mask=[0, 1, 1, 1, 0, 1, 0, 0],
        advantages=[0.0] * 8,
        behavior_logprobs=[0.0, -1.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0],
        proximal_logprobs=[0.0, -1.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0],
        behavior_versions=[-1, 0, 0, 0, 0, -1, -1, -1],
        proximal_versions=[-1, 0, 0, 0, 0, -1, -1, -1],
    )

    cut = fit_segment(long, 3, TooLong.CUT)
    assert cut.segment is not None
    assert cut.segment.ids.tolist() == [0, 1, 2]
    assert cut.lost == LostTokens(trained=1, masked=1, appended=1, context=2)
    assert fit_segment(long, 3, TooLong.DROP) == (None, LostTokens(trained=3, masked=1, appended=1, context=3))


def test_a_cut_that_leaves_nothing_to_train_leaves_the_segment_out():
    """A forward pass over context alone would be for nothing."""
    long = segment(20, prompt=12)
    assert fit_segment(long, 12, TooLong.CUT) == fit_segment(long, 12, TooLong.DROP)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 5), st.sampled_from([TooLong.DROP, TooLong.CUT]))
def test_no_token_is_lost_uncounted(length: int, packing_length: int, prompt: int, choice: TooLong):
    """Kept and lost add up to the segment, token kind by token kind; what is kept is unchanged."""
    whole = segment(length, prompt=max(prompt, 1))
    kept, lost = fit_segment(whole, packing_length, choice)
    assert (LostTokens.of(kept) if kept else LostTokens()) + lost == LostTokens.of(whole)
    if kept:
        assert len(kept) <= packing_length
        for name in COLUMNS:
            assert getattr(kept, name).tobytes() == getattr(whole, name)[: len(kept)].tobytes()
