"""What the rewards of a whole group say: whether it is worth training, and the advantages of its rollouts. Pure.

A rollout that counts and trains nothing has no reward: rules get as many rewards as the group has kept rollouts.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

GroupFilter = Callable[[Sequence[float]], str | None]
"""From the rewards of a group's rollouts to the reason why it is dropped, one word for telemetry; None keeps it."""

AdvantageRule = Callable[[Sequence[float]], Sequence[float]]
"""From the rewards of a group's rollouts to their advantages, in the same order."""

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
