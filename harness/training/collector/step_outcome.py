"""Step outcome: groups that a step hands over, the step once collected, packed and trained. Values.

Every rollout has one `Disposition`, in the step in which it ended, with its session's ledger: these make up the run's
ledger. A pack is named by its digest and its segments by rollout and sample, so a step can be packed again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from harness.samples.rollout import OutcomeKind
from harness.training.collector.groups import GroupIndex, RolloutIndex, ScoredRollout
from harness.training.collector.segment_maker import SegmentedSample
from harness.training.learner.learner import StepReport
from harness.types import Json


class Disposition(StrEnum):
    DELIVERED = "delivered"
    """Trained."""
    COUNTED = "counted"
    """Fills its place, untrained."""
    REPLACED = "replaced"
    """Failed or late; another attempt takes its place."""
    FILTERED = "filtered"
    OVER_SAMPLED = "over_sampled"
    """Group not needed."""
    CARRIED = "carried"
    """Not needed; continued next step."""


@dataclass(frozen=True, slots=True)
class SettledRollout:
    """A rollout without tokens."""

    index: RolloutIndex
    use: Disposition
    kind: OutcomeKind | None
    """None if cancelled without a session, or never ended."""
    session_id: str | None
    reward: float | None
    cause: str
    """Why it is not trained."""
    ledger: Json


@dataclass(frozen=True, slots=True)
class CollectedGroup:
    index: GroupIndex
    rollouts: tuple[ScoredRollout, ...]
    """To train, by member."""
    counted: int = 0
    """Untrained rollouts."""

    @property
    def rewards(self) -> list[float]:
        return [scored.reward for scored in self.rollouts if scored.reward is not None]


@dataclass(frozen=True, slots=True)
class CarriedGroup:
    """Group left to the next step, by member."""

    index: GroupIndex
    ended: Mapping[int, ScoredRollout] = field(default_factory=dict)
    cut_short: Mapping[int, ScoredRollout] = field(default_factory=dict)
    """Rollouts to continue."""
    attempts: Mapping[int, int] = field(default_factory=dict)
    """Next attempt, or the one to continue."""


@dataclass(frozen=True, slots=True)
class CollectedStep:
    step: int
    groups: tuple[GroupIndex, ...]
    """In hand-over order."""
    rollouts: tuple[SettledRollout, ...]
    """In the order of their ends."""
    dropped: Mapping[str, int]
    """Filtered groups by reason."""
    ended_groups: tuple[GroupIndex, ...]
    """Over-sampled groups."""
    carried: tuple[CarriedGroup, ...] = ()
    """Over-sampled groups that the next step continues."""
    left: tuple[RolloutIndex, ...] = ()
    """Rollouts that ignored their cancellation."""
    generate_s: float = 0.0
    """Seconds until the last group was whole."""


@dataclass(frozen=True, slots=True)
class PackFacts:
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

    async def packed(self, step: PackedStep) -> None:
        """Record a step before `finish_step`."""
