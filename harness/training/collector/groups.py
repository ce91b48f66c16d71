"""Group rules: filter a whole group, and compute its advantages. Pure."""

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

from harness.samples.credit import Advantages, Group
from harness.samples.turn_rewards import earned_rewards
from harness.training.collector.rollout_index import ScoredRollout

GroupFilter = Callable[[Sequence[float]], str | None]
"""From rewards to a drop reason (one word for telemetry), or None."""

AdvantageRule = Callable[[Sequence[float]], Sequence[float]]
"""From rewards to advantages, in order."""

CreditRule = Callable[[Group], Advantages]
"""Estimator of `samples.credit`."""

Advantage = float | tuple[float, ...]
"""One for all tokens, or one per trained turn."""

_LEAST_DEVIATION = 1e-4  # rewards that are nearly equal do not become large advantages


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
