"""Step result: packs, lost tokens and times. Values.

A pack is named by its digest and its segments by rollout and sample, so a step can be packed again and compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from harness.training.collector.rollout_index import RolloutIndex
from harness.training.collector.sample_account import SegmentedSample
from harness.training.collector.step_outcome import CollectedStep
from harness.training.learner.learner import StepReport


@dataclass(frozen=True, slots=True)
class PackFacts:
    """Pack that the learner received."""

    digest: str
    tokens: int
    trained: int
    """Counted in the pack, to check its segments."""
    segments: tuple[tuple[RolloutIndex, int], ...]
    """Rollout and sample number."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Step with all packs accumulated, before the update."""

    collected: CollectedStep
    version: int
    """Live policy version at the hand-over."""
    samples: tuple[SegmentedSample, ...]
    """Dropped ones included."""
    packs: tuple[PackFacts, ...]
    encoder_counts: Mapping[str, int]
    normalizer: float
    """This rank's part."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """In seconds."""

    total_s: float
    """Without rollouts generated ahead."""
    forward_s: float
    """In `Learner.accumulate`."""
    finish_s: float
    """In `Learner.finish_step`."""
    pack_waits_s: float
    """Learner idle, until the last pack."""
    overlap_s: float
    """Part of `forward_s` during generation."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """Step after its update."""

    packed: PackedStep
    report: StepReport
    times: StepTimes


class StepJournal(Protocol):
    """Durable record of progress. An exception fails the step untrained."""

    async def planned(self, step: int) -> None:
        """Record the begin of a step."""
        ...

    async def packed(self, step: PackedStep) -> None:
        """Record a step before `finish_step`."""
        ...
