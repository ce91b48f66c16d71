"""Estimators of credit against the true gradient of a game that the policy may end at any of its three turns."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import pytest

from harness.errors import ScenarioError
from harness.samples.credit import (
    Advantages,
    Group,
    return_to_go_advantages,
    rollout_advantages,
    turn_advantages,
    value_advantages,
)
from tests.thoroughness import examples

Floats = npt.NDArray[np.float64]
Rollout = list[tuple[int, int]]
"""State and action of each turn."""

STOP, TURNS, ACTIONS = 0, 3, 3
STATES = 1 + (TURNS - 1) * (ACTIONS - 1)
"""The beginning; afterwards the turn, and whether the last action was good or bad."""
EARNS = np.array([0.2, 1.0, 0.4])
"""Of an action after a good one, or at the beginning; after a bad one it earns half."""
SAMPLES, GROUP = examples(10_000), 3


def step(state: int, action: int) -> tuple[float, int | None]:
    """What an action earns, and the next state; None at the end."""
    reward = EARNS[action] * (0.5 if state and state % 2 == 0 else 1.0)
    turn = (state + 1) // 2
    return reward, None if action == STOP or turn == TURNS - 1 else 2 * turn + action


def probabilities(logits: Floats) -> Floats:
    """Of each action in each state."""
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def expected_reward(odds: Floats, state: int | None = 0) -> float:
    """By enumeration."""
    if state is None:
        return 0.0
    outcomes = [step(state, action) for action in range(ACTIONS)]
    return sum(
        odds[state, action] * (earned + expected_reward(odds, to)) for action, (earned, to) in enumerate(outcomes)
    )


def finite_differences(logits: Floats, width: float = 1e-5) -> Floats:
    """The gradient of the expected reward."""
    gradient = np.zeros_like(logits)
    for place in np.ndindex(logits.shape):
        ends = []
        for sign in (1, -1):
            moved = logits.copy()
            moved[place] += sign * width
            ends.append(expected_reward(probabilities(moved)))
        gradient[place] = (ends[0] - ends[1]) / (2 * width)
    return gradient


def play(odds: Floats, rng: np.random.Generator) -> tuple[Rollout, list[float]]:
    """One rollout, and what its turns earn."""
    rollout, rewards, state = [], [], 0
    while state is not None:
        action = int(np.searchsorted(odds[state].cumsum(), rng.random()))
        rollout.append((state, action))
        earned, state = step(state, action)
        rewards.append(earned)
    return rollout, rewards


def play_on(odds: Floats, state: int | None, rng: np.random.Generator) -> float:
    """What a rollout earns from a state on."""
    total = 0.0
    while state is not None:
        earned, state = step(state, int(np.searchsorted(odds[state].cumsum(), rng.random())))
        total += earned
    return total


@cache
def all_games(seed: int) -> tuple[Floats, list[list[tuple[Rollout, list[float]]]]]:
    """The logits of a policy, and many groups that it played."""
    logits = np.random.default_rng(seed).normal(scale=0.3, size=(STATES, ACTIONS))
    odds, rng = probabilities(logits), np.random.default_rng([seed, 5])
    return logits, [[play(odds, rng) for _ in range(GROUP)] for _ in range(SAMPLES)]


def gradients(estimate: Callable[[Group], Advantages], odds: Floats) -> Iterator[Floats]:
    """One estimate of the gradient for each group."""
    for games in all_games(2)[1]:
        gradient = np.zeros_like(odds)
        for (rollout, _), advantages in zip(games, estimate([rewards for _, rewards in games]), strict=True):
            for (state, action), advantage in zip(rollout, advantages, strict=True):
                gradient[state] -= odds[state] * advantage / GROUP
                gradient[state, action] += advantage / GROUP
        yield gradient


def distances(estimate: Callable[[Group], Advantages]) -> Floats:
    """How far the mean estimate is from the gradient, in its standard errors, by state and action."""
    logits, _ = all_games(2)
    made = np.array(list(gradients(estimate, probabilities(logits))))
    error = made.std(axis=0, ddof=1) / np.sqrt(len(made))
    distance: Floats = (made.mean(axis=0) - finite_differences(logits)) / error
    return distance


@pytest.mark.parametrize("estimate", [rollout_advantages, turn_advantages, return_to_go_advantages])
def test_an_unbiased_estimator_has_the_gradient_of_finite_differences(estimate: Callable[[Group], Advantages]):
    """In every component within its standard error, as far as so many components can be."""
    found = distances(estimate)
    assert np.sqrt((found**2).mean()) < 1.4
    assert np.abs(found).max() < 3.5


def test_values_of_forks_give_the_gradient():
    """Each turn's value is the reward of a single fork: noise without bias. The first one's is the same for all."""
    logits, groups = all_games(2)
    odds, rng = probabilities(logits), np.random.default_rng(7)
    turns = {id(rewards): [state for state, _ in rollout] for games in groups for rollout, rewards in games}

    def of_forks(group: Group) -> Advantages:
        values = []
        for rewards in group:
            earned = np.cumsum([0.0, *rewards])
            forked = [play_on(odds, state, rng) for state in turns[id(rewards)]]
            values.append([*(earned[:-1] + forked)])
        return value_advantages(values, [sum(rewards) for rewards in group])

    found = distances(of_forks)
    assert np.sqrt((found**2).mean()) < 1.4
    assert np.abs(found).max() < 3.5


def test_value_advantages_add_up_to_the_reward_less_the_first_value():
    [first, second] = value_advantages([[0.5, 0.75, 0.25], [0.5]], [1.0, 0.0])
    assert first.tolist() == [0.25, -0.5, 0.75]
    assert second.tolist() == [-0.5]


def test_a_turn_without_a_value_is_judged_by_those_around_it():
    """One of a rollout without any values gets the whole reward, as without turns."""
    [first, second] = value_advantages([[0.5, np.nan, 0.25], [0.5, np.nan]], [1.0, 0.0])
    assert first.tolist() == [-0.25, -0.25, 0.75]
    assert second.tolist() == [-0.5, -0.5]


def standardized(group: Group) -> Advantages:
    """GRPO: distances from the mean in standard deviations, both with the own reward."""
    totals = np.array([sum(rewards) for rewards in group])
    return [
        np.full(len(each), own)
        for each, own in zip(group, (totals - totals.mean()) / (totals.std() + 1e-4), strict=True)
    ]


@pytest.mark.parametrize("estimate", [partial(return_to_go_advantages, discount=0.5), standardized])
def test_a_discount_and_a_standard_deviation_are_biased(estimate: Callable[[Group], Advantages]):
    assert np.abs(distances(estimate)).max() > 5


def test_advantages_by_hand():
    group: Sequence[Sequence[float]] = [[1.0, 2.0], [4.0], [0.0, 1.0, 1.0]]
    assert [each.tolist() for each in rollout_advantages(group)] == [[0.0, 0.0], [1.5], [-1.5] * 3]
    assert [each.tolist() for each in turn_advantages(group)] == [[0.0, 0.0], [1.5], [-1.5, 0.0, 1.0]]
    whole = return_to_go_advantages(group)
    assert [each.tolist() for each in whole] == [[0.75, -0.25], [4 - 10 / 5], [2 - 3, 2 - 3, 1 - 3]]
    halved = return_to_go_advantages([[1.0, 2.0], [0.0]], 0.5)
    assert [each.tolist() for each in halved] == [[2.0, 2.0], [-2.0]]
    assert all(each.dtype == np.float64 for each in whole)


@pytest.mark.parametrize("estimate", [rollout_advantages, turn_advantages, return_to_go_advantages])
@pytest.mark.parametrize(
    ("group", "message"),
    [
        ([], "at least 2 rollouts to compare, got 0"),
        ([[1.0]], "at least 2 rollouts to compare, got 1"),
        ([[1.0], []], "rollout 1 of the group: expected a finite reward per turn"),
        ([[1.0, float("nan")], [1.0]], "rollout 0 of the group: expected a finite reward per turn"),
        ([[1.0], [0.0, float("-inf")]], "rollout 1 of the group: expected a finite reward per turn"),
    ],
)
def test_groups_that_say_nothing_are_refused(estimate: Callable[[Group], Advantages], group: Group, message: str):
    with pytest.raises(ScenarioError, match=message):
        estimate(group)


@pytest.mark.parametrize("discount", [-0.1, 1.1, float("nan")])
def test_a_discount_lies_between_0_and_1(discount: float):
    with pytest.raises(ScenarioError, match="expected a discount from 0 to 1"):
        return_to_go_advantages([[1.0], [0.0]], discount)
