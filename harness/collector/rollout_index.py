"""Where a rollout stands in training, and what it came to. Values without I/O."""

from dataclasses import dataclass

from harness.rollouts.seeds import derive_seed
from harness.samples.rollout import Rollout


@dataclass(frozen=True, slots=True, order=True)
class GroupIndex:
    """A prompt's place in training: the step that began it, and its number there."""

    step: int
    number: int
    """Unique over all ranks: below the budget's groups for the slices of the ranks, above for spare groups."""


@dataclass(frozen=True, slots=True, order=True)
class RolloutIndex:
    """A rollout's place in training: what it is asked and its seed depend on this alone, not on when it runs (I10)."""

    group: GroupIndex
    member: int
    """Its place in the group, from 0."""
    attempt: int = 0
    """How many rollouts were replaced in this place before it."""

    def seed(self, training_seed: int) -> int:
        """The seed of its session, in `range(2**63)`: another one for every rollout of a run."""
        base = derive_seed(training_seed, self.group.step)
        return derive_seed(base, self.group.number, self.member, self.attempt)


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout that has come to an end, with its reward."""

    index: RolloutIndex
    rollout: Rollout
    reward: float | None
    """None when there is none: the rollout failed, or was not to be scored. Then, and when it is not finite, nothing of
    the rollout is trained: a reward that is missing is never a zero."""
    error: str = ""
    """Why there is no reward, in words; empty where there is one, or the rollout's outcome says why."""
    has_kept_session: bool = False
    """It was ended with `Keep.SESSIONS`, and its session is still on its server, for a later rollout to go on from."""
