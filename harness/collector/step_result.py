"""What a step was made of, once it is packed and once it is trained: segments, packs, lost tokens, times. Values.

A pack is named by its digest, and its segments by rollout and sample, so a step can be packed again from the samples of
its rollouts, and compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from harness.collector.rollout_index import RolloutIndex
from harness.collector.sample_account import SegmentedSample
from harness.collector.step_outcome import CollectedStep
from harness.learner.learner import StepReport


@dataclass(frozen=True, slots=True)
class PackFacts:
    """A pack that the learner got."""

    digest: str
    """`Pack.digest`."""
    tokens: int
    trained: int
    """Tokens with loss mask 1, counted in the pack: the other side of the books of its segments."""
    segments: tuple[tuple[RolloutIndex, int], ...]
    """Rollout and number of the sample of each, in order."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step on one rank whose packs the learner has all had, before the weights change."""

    collected: CollectedStep
    version: int
    """The policy version that was live when its groups were handed over; the update makes the next one."""
    samples: tuple[SegmentedSample, ...]
    """In the order of their hand-over, dropped ones too."""
    packs: tuple[PackFacts, ...]
    encoder_counts: Mapping[str, int]
    """What the encoder has counted, summed over samples."""
    normalizer: float
    """This rank's part of it."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the time of a step went, in seconds."""

    total_s: float
    """From the beginning of the step, without what was generated ahead of it, to the end of the update."""
    forward_s: float
    """In `Learner.accumulate`."""
    finish_s: float
    """In `Learner.finish_step`."""
    pack_waits_s: float
    """The learner's time without a pack, from the beginning of the step to its last pack."""
    overlap_s: float
    """The part of `forward_s` in which rollouts, of this step or of the next, were being generated."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A step on one rank that has changed the weights."""

    packed: PackedStep
    report: StepReport
    """The learner's."""
    times: StepTimes


class StepJournal(Protocol):
    """Notes durably how far a step has come. What it raises (a full disk) fails the step before it is trained."""

    async def planned(self, step: int) -> None:
        """The first rollout of the step is about to begin."""
        ...

    async def packed(self, step: PackedStep) -> None:
        """Everything is known of the step, and `finish_step` comes next."""
        ...
