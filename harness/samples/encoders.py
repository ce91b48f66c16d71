"""From a finished rollout and one of its samples to a segment: the seam for tasks that train on more than was sampled.

An encoder may mask tokens, cut the end of a sample away and append tokens of its own. It may not touch what it keeps:
sampled tokens stay the sampled ids, with the logprobs and versions they were sampled with. `require_sampled_prefix`
holds every segment against its sample, whoever made it.

A token with loss mask 1 that nobody sampled (behavior version -1) has no behavior logprob to weigh it by: it is trained
by cross-entropy, with its advantage as the weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from harness.errors import SegmentError
from harness.samples.rollout import Rollout
from harness.samples.segments import COLUMNS, Segment
from harness.samples.versions import NOT_SAMPLED
from harness.types import Sample


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """What an encoder made of a sample: a segment, or the reason why there is none."""

    segment: Segment | None
    reason: str = ""
    """Why the sample is dropped, as one word for telemetry; empty where there is a segment."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What the encoder has met, by telemetry key; to be summed over samples."""


class SegmentEncoder(Protocol):
    """Makes segments of samples. Pure: the same rollout and sample give the same segment."""

    def encode(self, rollout: Rollout, sample: Sample) -> EncodedSample:
        """The segment of `sample`, which is one of those of `rollout`; advantages of sampled tokens come later."""
        ...


class WholeSampleEncoder:
    """The default: every sample as it is. One without a token to train is dropped (`nothing_to_train`)."""

    def encode(self, rollout: Rollout, sample: Sample) -> EncodedSample:  # noqa: ARG002
        """All tokens and columns of `sample`."""
        if not sample.loss_mask.any():
            return EncodedSample(None, "nothing_to_train")
        return EncodedSample(Segment.of_sample(sample))


def require_sampled_prefix(segment: Segment, sample: Sample) -> None:
    """Raises `SegmentError` unless `segment` is a beginning of `sample` and, after it, tokens that nobody sampled.

    Compared id by id, and so are the logprobs and versions. Masks may be 0 where the sample has 1, never the other way
    round.
    """
    whole = Segment.of_sample(sample)
    is_appended = (segment.loss_mask == 1) & (segment.behavior_versions == NOT_SAMPLED)
    kept = int(np.flatnonzero(is_appended)[0]) if is_appended.any() else len(segment)
    if kept > len(whole):
        raise SegmentError(f"the segment has {kept} tokens of a sample that has {len(whole)}")
    for name in COLUMNS:
        mine, sampled = getattr(segment, name)[:kept], getattr(whole, name)[:kept]
        if name == "advantages":
            continue
        is_wrong = mine > sampled if name == "loss_mask" else mine != sampled
        if is_wrong.any():
            at = int(np.flatnonzero(is_wrong)[0])
            raise SegmentError(f"{name} at token {at} is {sampled[at]} in the sample and {mine[at]} in the segment")
    late = np.flatnonzero(segment.behavior_versions[kept:] != NOT_SAMPLED)
    if late.size:
        raise SegmentError(f"token {kept + int(late[0])} counts as sampled, but stands behind one that was appended")
