"""The experts that the scripted engine chose for the tokens of a sample, worked out from its tokens and versions."""

from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.engines.scripted import scripted_experts
from harness.samples.codec import sample_from_json
from harness.token_rows import RoutedExperts, RowState, SampleRows
from harness.types import Sample

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


def true_rows(sample: Sample) -> npt.NDArray[Any]:
    """The row of each token, [tokens, layers, top_k]."""
    prompt = sample.tokens.size - sample.response_length
    versions = [-1] * prompt + sample.behavior_versions.tolist()
    true = np.zeros((sample.tokens.size, ROUTER.layers, ROUTER.top_k), ROUTER.dtype)
    for position in range(sample.tokens.size - 1):
        version = next(version for version in versions[position + 1 :] if version >= 0)
        true[position] = scripted_experts(ROUTER, sample.tokens[position : position + 1], position, str(version))[0]
    return true
