"""What the rewards of a whole group say: whether it is worth training, and the advantages of its rollouts. Pure.

A rollout that counts and trains nothing has no reward: rules get as many rewards as the group has kept rollouts.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

from harness.collector.rollout_index import ScoredRollout
from harness.samples.credit import Advantages, Group
from harness.samples.turn_rewards import earned_rewards

GroupFilter = Callable[[Sequence[float]], str | None]
"""From the rewards of a group's rollouts to the reason why it is dropped, one word for telemetry; None keeps it."""

AdvantageRule = Callable[[Sequence[float]], Sequence[float]]
"""From the rewards of a group's rollouts to their advantages, in the same order."""

CreditRule = Callable[[Group], Advantages]
"""From the rewards of a group's turns to their advantages: an estimator of `samples.credit`."""

Advantage = float | tuple[float, ...]
"""Of a rollout: one for all of its tokens, or one for each of its trained turns, in order."""

_LEAST_DEVIATION = 1e-4  # rewards that are nearly equal do not become large advantages


def drop_zero_variance(rewards: Sequence[float]) -> str | None:
    """Drops a group in which all rewards are equal: relative to its mean no rollout has an advantage."""
    return "zero_variance" if len(set(rewards)) <= 1 else None


def standardize(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / (standard deviation + 1e-4), of the group: all 0 where rewards are equal, or there is only one.

    The deviation is that of the group itself (divided by n).
    """
    mean, deviation = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / (deviation + _LEAST_DEVIATION) for reward in rewards]


def take_rewards(rewards: Sequence[float]) -> list[float]:
    """The rewards themselves, for groups of one rollout and for learners with a baseline of their own."""
    return list(rewards)


def credit_turns(rule: CreditRule, rollouts: Sequence[ScoredRollout]) -> list[Advantage]:
    """Advantages of the trained turns of a group's `rollouts`; 0 where failures have left one, as in `standardize`."""
    earned = [[*earned_rewards(each.rollout.samples, each.reward or 0.0).values()] for each in rollouts]
    if len(earned) < 2:
        return [(0.0,) * len(rewards) for rewards in earned]
    return [tuple(advantages.tolist()) for advantages in rule(earned)]
