"""Groups: rollouts by position in training, and rules that filter a group or compute its advantages. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import NamedTuple

from harness.rollouts.seeds import derive_seed
from harness.samples.credit import Advantages, Group, value_advantages
from harness.samples.rollout import Rollout
from harness.samples.turn_rewards import earned_rewards, values_of

GroupFilter = Callable[[Sequence[float]], str | None]
"""From rewards to a drop reason (one word for telemetry), or None."""

AdvantageRule = Callable[[Sequence[float]], Sequence[float]]
"""From rewards to advantages, in order."""

CreditRule = Callable[[Group], Advantages]
"""Estimator of `samples.credit`."""

Advantage = float | tuple[float, ...]
"""One for all tokens, or one per trained turn."""

_LEAST_DEVIATION = 1e-4  # rewards that are nearly equal do not become large advantages


class GroupIndex(NamedTuple):
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
    index: RolloutIndex
    rollout: Rollout
    reward: float | None
    """None if failed or not scored."""
    error: str = ""
    """Why there is no reward, unless the outcome says it."""
    has_kept_session: bool = False
    """A later rollout can continue its session."""


def drop_zero_variance(rewards: Sequence[float]) -> str | None:
    """Drop a group of equal rewards: no rollout has an advantage."""
    return "zero_variance" if len(set(rewards)) <= 1 else None


def standardize(rewards: Sequence[float]) -> list[float]:
    """Return (reward - mean) / (population standard deviation + 1e-4)."""
    mean, deviation = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / (deviation + _LEAST_DEVIATION) for reward in rewards]


def take_rewards(rewards: Sequence[float]) -> list[float]:
    """Return the rewards, for a learner with its own baseline."""
    return list(rewards)


def credit_turns(rule: CreditRule, rollouts: Sequence[ScoredRollout]) -> list[Advantage]:
    """Apply `rule` to the trained turns of `rollouts`."""
    earned = [[*earned_rewards(each.rollout.samples, each.reward or 0.0).values()] for each in rollouts]
    # Failures may leave one rollout. As in `standardize`, it has no advantage.
    if len(earned) < 2:
        return [(0.0,) * len(rewards) for rewards in earned]
    return [tuple(advantages.tolist()) for advantages in rule(earned)]


def credit_values(rollouts: Sequence[ScoredRollout]) -> list[Advantage]:
    """Give each trained turn the value of the state after it less that before it (`turn_values`).

    All rollouts of a group begin in one state, whose value for each is the mean reward of the others.
    """
    values = [[*values_of(each.rollout.samples).values()] for each in rollouts]
    if len(values) < 2:
        return [(0.0,) * len(turns) for turns in values]
    rewards = [each.reward or 0.0 for each in rollouts]
    others = [(sum(rewards) - own) / (len(rewards) - 1) for own in rewards]
    begun = [[mean, *turns[1:]] for mean, turns in zip(others, values, strict=True)]
    return [tuple(advantages.tolist()) for advantages in value_advantages(begun, rewards)]
