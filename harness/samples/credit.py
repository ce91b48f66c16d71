"""Advantages from the rewards of a group: one rollout against the others, or one turn against the others. Pure.

A group is several rollouts of one prompt. Each is the sequence of what its turns have earned, in the order of the
turns; the sum is the reward of the rollout. `samples.turn_rewards` makes these sequences. An estimator returns a
float64 array [turns] for each rollout, and the loss is the sum over turns of -advantage * ln(probability of the turn).

An estimator is unbiased when the mean of its gradient is that of the expected reward. A baseline keeps it so as long as
it depends on the other rollouts alone, or on what came before the turn. None of these divides by the standard deviation
of the group: that deviation depends on the rollout itself, and gives easy and hard prompts another weight
(arXiv:2503.20783). An own reward in the mean (GRPO) only scales the gradient, by 1 - 1 / n.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from harness.errors import ScenarioError

Group = Sequence[Sequence[float]]
"""Rewards of turns, by rollout."""

Advantages = list[npt.NDArray[np.float64]]
"""One per turn, by rollout."""


def rollout_advantages(group: Group) -> Advantages:
    """Give every turn the reward of its rollout less the mean reward of the others (RLOO, arXiv:2402.14740).

    GRPO (arXiv:2402.03300) without its standard deviation and with the own reward left out of the mean. Unbiased; a
    turn is also credited with what was earned before it, which is noise.

    Args:
        group: Of two rollouts or more, each with a turn or more.

    Raises `ScenarioError` for a smaller group, a rollout without turns and a reward that is not finite.
    """
    totals = np.array([rewards.sum() for rewards in _checked(group)])
    baselines = (totals.sum() - totals) / (totals.size - 1)
    return [np.full(len(rewards), own) for rewards, own in zip(group, totals - baselines, strict=True)]


def turn_advantages(group: Group) -> Advantages:
    """Give every turn the sum of the rewards from it on, less the mean of that of the others at the same turn.

    The others are those that have such a turn; without any the baseline is 0. Unbiased: whether a rollout has a turn is
    decided before that turn, so the baseline is one number whatever the turn says. What would be biased is to normalize
    the rewards turn by turn and to add up those of the own turns: the number of baselines in that sum is the number of
    turns, which the policy decides (verl#7244). See `rollout_advantages` for arguments and errors.
    """
    returns = [_returns(rewards, 1.0) for rewards in _checked(group)]
    longest = max(each.size for each in returns)
    table = np.array([np.pad(each, (0, longest - each.size)) for each in returns])
    others = np.array([np.arange(longest) < each.size for each in returns], dtype=np.float64)
    others = others.sum(axis=0) - others
    baselines = (table.sum(axis=0) - table) / np.maximum(others, 1)
    return [each - baseline[: each.size] for each, baseline in zip(returns, baselines, strict=True)]


def return_to_go_advantages(group: Group, discount: float = 1.0) -> Advantages:
    """Give every turn the discounted rewards from it on, less the mean of that over all turns of the others.

    A reward that comes k turns later counts `discount ** k` times (REINFORCE; per turn as in arXiv:2507.11948). The
    baseline knows no turn index: for rollouts whose turns of one index have little in common. Unbiased with a discount
    of 1. A smaller one lowers the variance and is biased: a turn is credited less for what it earns later, and no
    objective has this gradient (arXiv:1906.07073). See `rollout_advantages` for further arguments and errors; a
    discount outside 0 to 1 raises, too.
    """
    if not 0 <= discount <= 1:
        raise ScenarioError(f"expected a discount from 0 to 1, got {discount}")
    returns = [_returns(rewards, discount) for rewards in _checked(group)]
    sums, turns = (np.array([measure(each) for each in returns]) for measure in (np.sum, np.size))
    baselines = (sums.sum() - sums) / (turns.sum() - turns)
    return [each - baseline for each, baseline in zip(returns, baselines, strict=True)]


def _checked(group: Group) -> Advantages:
    if len(group) < 2:
        raise ScenarioError(f"expected a group of at least 2 rollouts to compare, got {len(group)}")
    for number, rewards in enumerate(group):
        if not len(rewards) or not np.isfinite(rewards).all():
            raise ScenarioError(
                f"rollout {number} of the group: expected a finite reward per turn, got {list(rewards)}"
            )
    return [np.asarray(rewards, dtype=np.float64) for rewards in group]


def _returns(rewards: npt.NDArray[np.float64], discount: float) -> npt.NDArray[np.float64]:
    """What each turn and those after it have earned."""
    returns = rewards.copy()
    for turn in range(rewards.size - 2, -1, -1):
        returns[turn] += discount * returns[turn + 1]
    return returns
