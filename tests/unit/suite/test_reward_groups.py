"""Groups of samples of one prompt: their mean, its interval, the best, the worst, and pass@k."""

from fractions import Fraction
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.suite.judge.groups import Rewarded, by_prompt, pass_at


def _prompts(*groups: list[float]) -> list[Rewarded]:
    numbered = ((group, reward) for group, rewards in enumerate(groups) for reward in rewards)
    return [Rewarded("s", group, number, reward) for number, (group, reward) in enumerate(numbered)]


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6), min_size=1, max_size=3))
def test_pass_at_k_is_the_share_of_draws_with_a_passing_sample(groups: list[list[float]]) -> None:
    """Counted over every draw of k samples without replacement; k goes up to the smallest group."""
    found = pass_at(by_prompt(_prompts(*groups)))

    fewest = min(map(len, groups))
    assert list(found) == [k for k in (1, 2, 4) if k <= fewest]
    for k, share in found.items():
        draws = [[max(draw) >= 1 for draw in combinations(rewards, k)] for rewards in groups]
        assert share == pytest.approx(float(sum(Fraction(sum(each), len(each)) for each in draws) / len(groups)))


def test_a_prompt_names_its_best_and_worst_session() -> None:
    """By number, in whatever order rollouts end; the first of equals."""
    [first, second] = by_prompt(reversed(_prompts([0.25, 1.0, 0.25, 1.0], [-1.0])))

    assert (first.group, first.mean, first.best, first.worst, first.passed) == (0, 0.625, 1, 0, 2)
    assert (second.group, second.mean, second.best, second.worst) == (1, -1.0, 4, 4)


def test_the_interval_of_a_mean_is_students() -> None:
    """Five samples are the fewest; the quantile for four degrees of freedom is 2.776."""
    [four, five] = by_prompt(_prompts([0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0, 1.0]))

    assert four.interval is None
    assert five.interval is not None
    half = 2.776 * (0.3 / 5) ** 0.5  # the sample variance is 0.3
    assert list(five.interval) == pytest.approx([0.6 - half, 0.6 + half], abs=0.003)
    assert fmean(five.interval) == pytest.approx(five.mean)


def test_without_rewards_there_is_no_estimate() -> None:
    assert pass_at(by_prompt([])) == {}
