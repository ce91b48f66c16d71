"""Step outcome: handed-over groups, and a step at its end. No I/O.

Every rollout has one `RolloutUse`, in the step in which it ended, with its session's ledger: these make up the run's
ledger.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from harness.samples.rollout import OutcomeKind
from harness.training.collector.rollout_index import GroupIndex, RolloutIndex, ScoredRollout
from harness.types import Json


class RolloutUse(StrEnum):
    """Use of a rollout in a step."""

    DELIVERED = "delivered"
    """Trained."""
    COUNTED = "counted"
    """In the step, untrained."""
    REPLACED = "replaced"
    """Failed or late; retried."""
    FILTERED = "filtered"
    OVER_SAMPLED = "over_sampled"
    """Group not needed."""
    CARRIED = "carried"
    """Not needed; continued next step."""


@dataclass(frozen=True, slots=True)
class SettledRollout:
    """A rollout without tokens."""

    index: RolloutIndex
    use: RolloutUse
    kind: OutcomeKind | None
    """None if cancelled without a session, or never ended."""
    session_id: str | None
    reward: float | None
    cause: str
    """Why it is not trained."""
    ledger: Json
    seconds: float


@dataclass(frozen=True, slots=True)
class CollectedGroup:
    """A whole group of a step."""

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
    """Complete step on one rank."""

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
