"""Experts and candidates of a sample's tokens in the scripted engine, worked out from its tokens and versions."""

from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.engines.scripted import scripted_experts, scripted_masks
from harness.samples.codec import sample_from_json
from harness.sampling_masks import SampleMasks
from harness.token_rows import RoutedExperts, RowState, SampleRows
from harness.types import Sample
from tests.builders import toy_tokenizer

ROUTER = RoutedExperts(layers=2, top_k=2, experts=8)
"""That of the scripted engine."""


def rows_of(sample: Sample | Mapping[str, Any]) -> SampleRows:
    """The rows of a sample, which must have some."""
    rows = (sample if isinstance(sample, Sample) else sample_from_json(dict(sample))).routed_experts
    assert rows is not None
    return rows


def must_be_true(sample: Sample | Mapping[str, Any], may_miss: Set[RowState] = frozenset()) -> None:
    """Every row is that of the weights that sampled the next token; only the last and `may_miss` are missing (I12)."""
    sample = sample if isinstance(sample, Sample) else sample_from_json(dict(sample))
    rows, size = rows_of(sample), sample.tokens.size
    states = [RowState(state) for state in rows.states.tolist()]
    assert len(rows.values) == len(states) == size
    assert states[-1] is RowState.NOT_READ
    assert {*states[:-1]} <= {RowState.PRESENT, *may_miss}
    missing = {state.name.lower(): states[:-1].count(state) for state in {*states[:-1]} - {RowState.PRESENT}}
    assert sample.metadata.get("missing_rows", {}) == missing
    true = true_rows(sample)
    present = rows.states == RowState.PRESENT
    wrong = np.flatnonzero(present & (rows.values != true).any(axis=(1, 2))) if present.any() else []
    assert not len(wrong), f"wrong at {[*wrong]} of {size} tokens"


def masks_of(sample: Sample | Mapping[str, Any]) -> SampleMasks:
    """The masks of a sample, which must have some."""
    masks = (sample if isinstance(sample, Sample) else sample_from_json(dict(sample))).sampling_mask
    assert masks is not None
    return masks


def masks_must_be_true(sample: Sample | Mapping[str, Any], may_miss: Set[RowState] = frozenset()) -> None:
    """Every sampled token has its candidates, those of its own version; only `may_miss` are missing (I12)."""
    sample = sample if isinstance(sample, Sample) else sample_from_json(dict(sample))
    masks, start = masks_of(sample), sample.tokens.size - sample.response_length
    states = [RowState(state) for state in masks.states.tolist()]
    sampled = (sample.behavior_versions >= 0).tolist()
    assert [state is not RowState.NOT_READ for state in states] == sampled
    assert {*states} <= {RowState.PRESENT, RowState.NOT_READ, *may_miss}
    missing = {state.name.lower(): states.count(state) for state in may_miss if state in states}
    assert sample.metadata.get("missing_masks", {}) == missing
    for at, state in enumerate(states):
        token = sample.tokens[start + at : start + at + 1]
        true = scripted_masks(token, start + at, str(sample.behavior_versions[at]), toy_tokenizer().vocab_size)[0]
        found = masks.values[masks.offsets[at] : masks.offsets[at + 1]]
        assert found.tolist() == (true.tolist() if state is RowState.PRESENT else []), f"wrong at {at}"


def true_rows(sample: Sample) -> npt.NDArray[Any]:
    """The row of each token, [tokens, layers, top_k]."""
    prompt = sample.tokens.size - sample.response_length
    versions = [-1] * prompt + sample.behavior_versions.tolist()
    true = np.zeros((sample.tokens.size, ROUTER.layers, ROUTER.top_k), ROUTER.dtype)
    for position in range(sample.tokens.size - 1):
        version = next(version for version in versions[position + 1 :] if version >= 0)
        true[position] = scripted_experts(ROUTER, sample.tokens[position : position + 1], position, str(version))[0]
    return true
