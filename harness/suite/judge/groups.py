"""Rewards by prompt: mean with interval, best and worst sample, pass@k. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

from harness.samples.turn_rewards import TurnValue
from harness.types import Json

CONFIDENCE = 0.95
FEWEST = 5
"""Least number of values for an interval. With two rewards of 0 and 1, it would cover the mean only in 80 %."""
PASSING = 1.0
"""Least reward of a sample that passes."""


class Interval(NamedTuple):
    """Confidence interval of a mean, by Student's t."""

    low: float
    high: float


class Rewarded(NamedTuple):
    scenario: str
    group: int
    number: int
    reward: float


@dataclass(frozen=True, slots=True)
class PromptRewards:
    """Rewards of a prompt's samples, by number of the rollout; never empty."""

    scenario: str
    group: int
    rewards: Mapping[int, float]

    @property
    def mean(self) -> float:
        return fmean(self.rewards.values())

    @property
    def interval(self) -> Interval | None:
        """Interval of the mean; None for fewer than `FEWEST` samples."""
        if len(self.rewards) < FEWEST:
            return None
        count = len(self.rewards)
        half = t_quantile((1 + CONFIDENCE) / 2, count - 1) * stdev(self.rewards.values()) / math.sqrt(count)
        return Interval(self.mean - half, self.mean + half)

    @property
    def best(self) -> int:
        """Rollout with the highest reward, the first of equals."""
        return max(self.rewards, key=self.rewards.__getitem__)

    @property
    def worst(self) -> int:
        """Rollout with the lowest reward, the first of equals."""
        return min(self.rewards, key=self.rewards.__getitem__)

    @property
    def passed(self) -> int:
        return sum(reward >= PASSING for reward in self.rewards.values())

    def to_json(self) -> Json:
        return {
            "group": self.group,
            "samples": len(self.rewards),
            "passed": self.passed,
            "mean": self.mean,
            "interval": self.interval,
            "best": self.best,
            "worst": self.worst,
        }


def by_prompt(rewarded: Iterable[Rewarded]) -> list[PromptRewards]:
    """Return the prompts in order of their first rollouts."""
    prompts: dict[tuple[str, int], dict[int, float]] = {}
    for each in sorted(rewarded, key=lambda each: each.number):
        prompts.setdefault((each.scenario, each.group), {})[each.number] = each.reward
    return [PromptRewards(*prompt, rewards) for prompt, rewards in prompts.items()]


def pass_at(prompts: Sequence[PromptRewards]) -> dict[int, float]:
    """Return pass@k for k = 1, 2, 4, ... up to the fewest samples of a prompt."""
    if not prompts:
        return {}
    fewest = min(len(each.rewards) for each in prompts)
    ks = takewhile(lambda k: k <= fewest, (2**power for power in range(fewest.bit_length())))
    return {k: fmean(_pass_at(len(each.rewards), each.passed, k) for each in prompts) for k in ks}


def value_of(rewards: Sequence[float]) -> TurnValue | None:
    """Return the mean of the rewards of a turn's forks with an interval that suits few of them; None without any."""
    if not rewards:
        return None
    count, mean = len(rewards), fmean(rewards)
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    if min(rewards) >= 0 and max(rewards) <= 1:
        # Wilson's score interval. No distribution on 0 to 1 has a larger variance than 0 and 1 with its mean.
        share = 1 + z**2 / count
        middle = (mean + z**2 / (2 * count)) / share
        half = z * math.sqrt(mean * (1 - mean) / count + (z / (2 * count)) ** 2) / share
        return TurnValue(mean, middle - half, middle + half, count)
    if count == 1:
        return TurnValue(mean, None, None, 1)
    half = t_quantile((1 + CONFIDENCE) / 2, count - 1) * stdev(rewards) / math.sqrt(count)
    return TurnValue(mean, mean - half, mean + half, count)


def _pass_at(samples: int, passed: int, k: int) -> float:
    # The unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", section 2.1.
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t, within 0.3 % for four or more degrees of freedom."""
    # Abramowitz and Stegun, 26.7.5.
    z: float = NormalDist().inv_cdf(probability)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, 1))
