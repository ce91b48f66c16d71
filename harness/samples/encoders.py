"""Encoders: turn a sample into a segment, for tasks that train on more than was sampled.

They may mask tokens, cut the end and append tokens, but not change what they keep. Appended tokens have behavior
version -1 and are trained by cross-entropy, weighted by their advantage.
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
    """A segment, or the reason for none."""

    segment: Segment | None
    reason: str = ""  # one word for telemetry
    counts: Mapping[str, int] = field(default_factory=dict)  # by telemetry key


class SegmentEncoder(Protocol):
    def encode(self, rollout: Rollout, sample: Sample) -> EncodedSample:
        """Return the segment of `sample`; the caller sets advantages of sampled tokens."""
        ...


class WholeSampleEncoder:
    """Default: keeps samples whole."""

    def encode(self, rollout: Rollout, sample: Sample) -> EncodedSample:
        if not sample.loss_mask.any():
            return EncodedSample(None, "nothing_to_train")
        return EncodedSample(Segment.of_sample(sample))


def require_sampled_prefix(segment: Segment, sample: Sample) -> None:
    """Raise `SegmentError` unless `segment` is a prefix of `sample` plus appended tokens. Masks may only fall."""
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
    if whole.sampling_mask is not None:
        masks = segment.sampling_mask
        if masks is None or masks.part(0, kept).to_plain() != whole.sampling_mask.part(0, kept).to_plain():
            raise SegmentError("sampling_mask differs from the sample's; an encoder keeps it")
    if whole.routed_experts is not None:
        rows = segment.routed_experts
        if rows is None or not rows.first(kept).equals(whole.routed_experts.first(kept)):
            raise SegmentError("the segment lacks routed experts of the sample, or has others; an encoder keeps them")
    late = np.flatnonzero(segment.behavior_versions[kept:] != NOT_SAMPLED)
    if late.size:
        raise SegmentError(f"token {kept + int(late[0])} counts as sampled, but follows an appended one")
