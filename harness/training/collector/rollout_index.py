"""Rollout values: position in training, and result. No I/O."""

from dataclasses import dataclass

from harness.rollouts.seeds import derive_seed
from harness.samples.rollout import Rollout


@dataclass(frozen=True, slots=True, order=True)
class GroupIndex:
    """A prompt's position: the step that began it, and its number."""

    step: int
    number: int
    """Unique over all ranks; spare groups come after the budget's."""


@dataclass(frozen=True, slots=True, order=True)
class RolloutIndex:
    """A rollout's position, which alone sets its prompt and seed (I10)."""

    group: GroupIndex
    member: int
    attempt: int = 0

    def seed(self, training_seed: int) -> int:
        """Return the session seed, in `range(2**63)`."""
        base = derive_seed(training_seed, self.group.step)
        return derive_seed(base, self.group.number, self.member, self.attempt)


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """An ended rollout with its reward."""

    index: RolloutIndex
    rollout: Rollout
    reward: float | None
    """None if failed or not scored."""
    error: str = ""
    """Why there is no reward, unless the outcome says it."""
    has_kept_session: bool = False
    """A later rollout can continue its session."""
