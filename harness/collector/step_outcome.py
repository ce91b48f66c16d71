"""What a collector hands over, group by group, and what it says of a step at its end. Values without I/O.

Every rollout that began has one `RolloutUse` in the step in which it came to its end, and its session's ledger beside
it: the ledger of the run is made of these. A rollout that is carried comes to its end in a later step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from harness.collector.rollout_index import GroupIndex, RolloutIndex, ScoredRollout
from harness.samples.rollout import OutcomeKind
from harness.types import Json


class RolloutUse(StrEnum):
    """What a step made of a rollout."""

    DELIVERED = "delivered"
    """It is one of the step's, and what its samples hold is trained."""
    COUNTED = "counted"
    """It is one of the step's, and nothing of it is trained."""
    REPLACED = "replaced"
    """It failed or was late; another attempt took its place."""
    FILTERED = "filtered"
    """A filter dropped its group."""
    OVER_SAMPLED = "over_sampled"
    """The step was complete without its group; it was ended, or had ended."""
    CARRIED = "carried"
    """The same, and the next step goes on with it."""


@dataclass(frozen=True, slots=True)
class SettledRollout:
    """What is worth knowing of a rollout, without its tokens."""

    index: RolloutIndex
    use: RolloutUse
    kind: OutcomeKind | None
    """None when it was cancelled before it had a session, or never came to an end."""
    session_id: str | None
    reward: float | None
    cause: str
    """Why it is not trained; empty when it is."""
    ledger: Json
    """Of its session, as in its record; all zero without one."""
    seconds: float


@dataclass(frozen=True, slots=True)
class CollectedGroup:
    """A whole group of a step."""

    index: GroupIndex
    rollouts: tuple[ScoredRollout, ...]
    """To be trained, by member; each has a finite reward. Counted ones are left out."""
    counted: int = 0
    """Rollouts that are of the step, and are not trained."""

    @property
    def rewards(self) -> list[float]:
        """Of `rollouts`."""
        return [scored.reward for scored in self.rollouts if scored.reward is not None]


@dataclass(frozen=True, slots=True)
class CarriedGroup:
    """A group that a step began, did not need, and leaves to the next one."""

    index: GroupIndex
    ended: Mapping[int, ScoredRollout] = field(default_factory=dict)
    """Rollouts that fill their places, by member."""
    cut_short: Mapping[int, ScoredRollout] = field(default_factory=dict)
    """Rollouts to go on with, by member; their sessions were kept."""
    attempts: Mapping[int, int] = field(default_factory=dict)
    """By member, the number of the attempt that comes next: that of the rollout to go on with where there is one."""


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """A step on one rank, once it is complete and everything that it began has ended."""

    step: int
    groups: tuple[GroupIndex, ...]
    """Those that make the step, in the order in which they were handed over."""
    rollouts: tuple[SettledRollout, ...]
    """Every rollout that came to its end, in the order in which they did."""
    dropped: Mapping[str, int]
    """Groups that the filter dropped, by reason."""
    ended_groups: tuple[GroupIndex, ...]
    """Groups that were over-sampled: begun, and no part of the step."""
    carried: tuple[CarriedGroup, ...] = ()
    """Those of them that the next step goes on with."""
    left: tuple[RolloutIndex, ...] = ()
    """Rollouts that ignored their cancellation and may still run."""
    generate_s: float = 0.0
    """From the first rollout that began until the last group was whole."""
