"""Segments with values that tell them apart."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from harness.samples.segments import Segment


def segment(length: int, seed: int = 0, prompt: int = 1) -> Segment:
    """A segment of `length` tokens: `prompt` of context, then sampled ones, some of them masked, some scored."""
    rng = np.random.default_rng([length, seed])
    is_sampled = np.arange(length) >= prompt
    behavior = np.where(is_sampled, rng.integers(0, 4, length), -1)
    logprobs = np.where(is_sampled, -rng.random(length), 0.0).astype(np.float32)
    has_met = is_sampled & (rng.random(length) < 0.5)
    return Segment(
        ids=rng.integers(0, 1000, length),
        loss_mask=is_sampled & (rng.random(length) < 0.8),
        advantages=rng.normal(size=length).astype(np.float32),
        behavior_logprobs=logprobs,
        proximal_logprobs=np.where(has_met, logprobs - np.float32(0.25), logprobs),
        behavior_versions=behavior,
        proximal_versions=behavior + has_met,
    )


def segments_of(lengths: Sequence[int]) -> list[Segment]:
    """One for each length, all of them different."""
    return [segment(length, seed) for seed, length in enumerate(lengths)]


def lengths_up_to(packing_length: int, *, most: int = 60) -> st.SearchStrategy[list[int]]:
    """Lengths of segments that a pack can hold; some of them fill one together exactly."""
    return st.lists(
        st.one_of(
            st.integers(1, packing_length),
            st.sampled_from([packing_length, max(packing_length // 2, 1), max(packing_length // 3, 1), 1]),
        ),
        max_size=most,
    )
