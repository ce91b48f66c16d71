"""Two runs side by side: how their rollouts ended, rewards, tokens, ledgers, and where each pair of sessions parts.

Rollouts are paired by prompt and place in its group, which is what their seed stands for, whatever else the runs hold
and wherever they were stopped. Runs that have no seed in common are paired by the positions themselves; sessions that
belong to no run by their ids. A part of a run that is missing is a sentence in `missing`; the others are compared.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from harness.types import Json
from harness.viewer.damage import say_missing
from harness.viewer.divergence import Divergence, find_divergence
from harness.viewer.look import look_at, look_into, open_tokenizer
from harness.viewer.run_view import RunView, SessionLine

CONFIDENCE = 0.95
_RESAMPLES = 2_000
_SEED = 0


@dataclass(frozen=True, slots=True)
class RewardDiff:
    """Rewards of the pairs in which both have one."""

    pairs: int
    prompts: int
    means: tuple[float, float]
    difference: float
    """Mean of second minus first."""
    interval: tuple[float, float] | None
    """Of the difference: percentiles of a bootstrap over prompts, which keeps the pairs of one prompt together.
    None with fewer than two prompts."""


@dataclass(frozen=True, slots=True)
class SessionPair:
    """Two rollouts of one prompt, or two sessions that somebody named."""

    first: SessionLine
    second: SessionLine
    compared: bool
    """Whether both had their tokens; if not, `divergence` says nothing."""
    divergence: Divergence | None = None


@dataclass(frozen=True, slots=True)
class RunDiff:
    """What differs between two runs; pairs of values are the first run's and the second's."""

    sources: tuple[str, str]
    outcomes: Mapping[str, tuple[int, int]]
    rewards: RewardDiff | None
    """None when no pair has two rewards."""
    tokens: tuple[int, int]
    ledgers: tuple[Json | None, Json | None]
    pairs: Sequence[SessionPair]
    alone: tuple[int, int]
    """Sessions that have no partner."""
    missing: Sequence[str] = field(default_factory=list)


def compare_runs(first: Path, second: Path, tokenizer: Path | None = None) -> RunDiff:
    """The runs or stores at both paths. Raises `RunError` when one is neither, `StoreError` of a bad store."""
    views = look_at(first), look_at(second)
    missing = [f"{view.source}: {sentence}" for view in views for sentence in view.missing]
    seeds = [{(line.scenario, line.seed) for line in view.sessions if line.seed is not None} for view in views]
    key = _by_seed if seeds[0] & seeds[1] else _by_place
    keyed = key(views[0].sessions), key(views[1].sessions)
    common = [key for key in keyed[0] if key in keyed[1]]
    pairs = _compare(views, [(keyed[0][key], keyed[1][key]) for key in common], tokenizer, missing)
    counts = [Counter(line.outcome or "no outcome" for line in view.sessions) for view in views]
    tokens = [sum(line.sampled or 0 for line in view.sessions) for view in views]
    return RunDiff(
        sources=(views[0].source, views[1].source),
        outcomes={name: (counts[0][name], counts[1][name]) for name in sorted(counts[0] | counts[1])},
        rewards=compare_rewards(pairs),
        tokens=(tokens[0], tokens[1]),
        ledgers=(views[0].ledger, views[1].ledger),
        pairs=pairs,
        alone=(len(keyed[0]) - len(common), len(keyed[1]) - len(common)),
        missing=missing,
    )


def compare_sessions(
    first: tuple[Path, str], second: tuple[Path, str], tokenizer: Path | None = None
) -> tuple[SessionPair, Sequence[str]]:
    """Two sessions by run and name, and what is missing. Raises `RunError` when one is not there."""
    views = look_at(first[0]), look_at(second[0])
    missing = [f"{view.source}: {sentence}" for view in views for sentence in view.missing]
    lines = views[0].find(first[1]), views[1].find(second[1])
    [pair] = _compare(views, [lines], tokenizer, missing)
    return pair, missing


def compare_rewards(pairs: Sequence[SessionPair]) -> RewardDiff | None:
    """The rewards of the pairs; the same pairs give the same interval."""
    both = [
        ((pair.first.scenario, pair.first.group), pair.first.reward, pair.second.reward)
        for pair in pairs
        if pair.first.reward is not None and pair.second.reward is not None
    ]
    if not both:
        return None
    by_prompt: dict[tuple[str | None, int | None], list[float]] = {}
    for prompt, one, other in both:
        by_prompt.setdefault(prompt, []).append(other - one)
    interval = None
    if len(by_prompt) > 1:
        sums = np.array([sum(each) for each in by_prompt.values()])
        sizes = np.array([len(each) for each in by_prompt.values()])
        drawn = np.random.default_rng(_SEED).integers(len(by_prompt), size=(_RESAMPLES, len(by_prompt)))
        means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
        low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        interval = float(low), float(high)
    count = len(both)
    firsts, seconds = sum(one for _, one, _ in both) / count, sum(other for _, _, other in both) / count
    return RewardDiff(count, len(by_prompt), (firsts, seconds), seconds - firsts, interval)


def _by_seed(lines: Sequence[SessionLine]) -> dict[Hashable, SessionLine]:
    return {(line.scenario, line.session_id if line.seed is None else line.seed): line for line in lines}


def _by_place(lines: Sequence[SessionLine]) -> dict[Hashable, SessionLine]:
    placed: dict[Hashable, SessionLine] = {}
    taken: Counter[tuple[str | None, int | None]] = Counter()
    for line in sorted(lines, key=lambda each: -1 if each.number is None else each.number):
        prompt = line.scenario, line.group
        placed[(*prompt, line.session_id if line.number is None else taken[prompt])] = line
        taken[prompt] += 1
    return placed


def _compare(
    views: tuple[RunView, RunView],
    lines: Sequence[tuple[SessionLine, SessionLine]],
    named: Path | None,
    missing: list[str],
) -> list[SessionPair]:
    tokenizers = open_tokenizer(views[0], named), open_tokenizer(views[1], named)
    if tokenizers[0] is not None and tokenizers[1] is not None and tokenizers[0].digest != tokenizers[1].digest:
        missing.append("one tokenizer: the runs have two, so the same id may be another text")
    pairs = []
    for one, other in lines:
        divergence, compared = None, False
        if one.session_id is not None and other.session_id is not None:
            with say_missing(f"where {_name(one)} and {_name(other)} part", missing):
                seen = (
                    look_into(Path(views[0].source), one.session_id),
                    look_into(Path(views[1].source), other.session_id),
                )
                divergence = find_divergence(*seen, tokenizers)
                compared = True
        pairs.append(SessionPair(one, other, compared, divergence))
    return pairs


def _name(line: SessionLine) -> str:
    return f"session {line.session_id}" if line.number is None else f"rollout {line.number}"
