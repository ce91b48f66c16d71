"""Advantage estimators over the turn rewards of a group of rollouts. Pure.

They return float64 [turns] per rollout. The loss is the sum over turns of -advantage * ln(probability of the turn).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from harness.errors import ScenarioError

# An estimator is unbiased if its mean gradient is the gradient of the expected reward. A baseline keeps it so if it
# depends only on the other rollouts or on what came before the turn. None of these divides by the group's standard
# deviation, which depends on the rollout itself and reweights easy and hard prompts (arXiv:2503.20783). GRPO
# (arXiv:2402.03300) has the own reward in the mean, which only scales the gradient by 1 - 1 / n.
Group = Sequence[Sequence[float]]
"""Turn rewards, by rollout."""

Advantages = list[npt.NDArray[np.float64]]
"""One value per turn, by rollout."""


def rollout_advantages(group: Group) -> Advantages:
    """Give every turn the reward of its rollout minus the mean of the others (RLOO, arXiv:2402.14740).

    Raises `ScenarioError` for fewer than 2 rollouts, one without turns, or a reward that is not finite.
    """
    # Unbiased. Turns also get credit for earlier rewards, which adds noise.
    totals = np.array([rewards.sum() for rewards in _checked(group)])
    baselines = (totals.sum() - totals) / (totals.size - 1)
    return [np.full(len(rewards), own) for rewards, own in zip(group, totals - baselines, strict=True)]


def turn_advantages(group: Group) -> Advantages:
    """Give every turn its reward-to-go minus the mean of the other rollouts that have that turn; 0 without any."""
    returns = [_returns(rewards, 1.0) for rewards in _checked(group)]
    longest = max(each.size for each in returns)
    table = np.array([np.pad(each, (0, longest - each.size)) for each in returns])
    # Unbiased: whether a rollout has a turn is decided before that turn, so its baseline does not depend on the turn.
    # Normalizing the rewards per turn and summing the own turns would be biased: the policy decides the number of
    # turns, and so the number of baselines in the sum (verl#7244).
    others = np.array([np.arange(longest) < each.size for each in returns], dtype=np.float64)
    others = others.sum(axis=0) - others
    baselines = (table.sum(axis=0) - table) / np.maximum(others, 1)
    return [each - baseline[: each.size] for each, baseline in zip(returns, baselines, strict=True)]


def return_to_go_advantages(group: Group, discount: float = 1.0) -> Advantages:
    """Give every turn its discounted reward-to-go minus the mean over all turns of the others.

    For rollouts whose turns do not correspond. Raises `ScenarioError` for a discount outside 0 to 1.
    """
    if not 0 <= discount <= 1:
        raise ScenarioError(f"expected a discount from 0 to 1, got {discount}")
    # REINFORCE; per turn as in arXiv:2507.11948. A discount below 1 lowers the variance but is biased: a turn gets less
    # credit for later rewards, and no objective has this gradient (arXiv:1906.07073).
    returns = [_returns(rewards, discount) for rewards in _checked(group)]
    sums, turns = (np.array([measure(each) for each in returns]) for measure in (np.sum, np.size))
    baselines = (sums.sum() - sums) / (turns.sum() - turns)
    return [each - baseline for each, baseline in zip(returns, baselines, strict=True)]


def value_advantages(values: Group, rewards: Sequence[float]) -> Advantages:
    """Give every turn the value of the state after it minus that before it; the last one ends at the reward.

    `values` are of the states before each turn, by rollout, the first of them finite. In place of NaN stands the next
    value for the state after a turn, and the last one for the state before it.
    """
    # Unbiased for exact values, and for means of forks, which depend only on what came before their turn: the values
    # of the states between cancel or serve as baselines (VinePPO, arXiv:2410.01679).
    advantages = []
    for each, reward in zip(values, rewards, strict=True):
        states = np.array([*each, reward])
        known, places = np.flatnonzero(~np.isnan(states)), np.arange(len(states))
        before = states[known[np.searchsorted(known, places[:-1], side="right") - 1]]
        advantages.append(states[known[np.searchsorted(known, places[1:])]] - before)
    return advantages


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
    returns = rewards.copy()
    for turn in range(rewards.size - 2, -1, -1):
        returns[turn] += discount * returns[turn + 1]
    return returns
