"""Two runs compared: outcomes, rewards, tokens, ledgers, and the first difference of each pair of sessions.

Rollouts are paired by seed, which stands for a prompt and a place in its group. A scenario without a common seed is
paired by these positions; sessions of no run are paired by id. A missing part is a sentence in `missing`.

Turns of a pair are compared in order of admission, by tokens and parent; of an heir, without those that its agent did
not ask for again. Engine facts (logprob, version) do not count.
"""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np

from harness.errors import RunError
from harness.suite.judge.groups import CONFIDENCE, FEWEST, t_quantile
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.look import look_at, look_into, open_tokenizer
from harness.viewer.run_view import RunView, SessionLine, say_missing
from harness.viewer.session_view import SessionView, TurnView

# Tokens shown around the first different one.
_BEFORE, _BEHIND = 8, 24


class Part(StrEnum):
    """Part of a turn in which two sessions differ."""

    PARENT = "parent"
    PROMPT = "prompt"
    """Different ids were added to the conversation."""
    OUTPUT = "output"
    TURNS = "turns"
    """One session has no such turn."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first difference of two sessions. Pairs are (first, second)."""

    turn: int
    part: Part
    position: int | None = None
    """Index in the added prompt ids or in the output; None if no token differs."""
    token_ids: tuple[int | None, int | None] = (None, None)
    """None for the session that ends there."""
    texts: tuple[str | None, str | None] = (None, None)
    """Text around the position; None without a tokenizer."""


@dataclass(frozen=True, slots=True)
class RewardDiff:
    """Rewards of the pairs with two rewards."""

    pairs: int
    prompts: int
    means: tuple[float, float]
    difference: float
    """Mean of second minus first."""
    interval: tuple[float, float] | None
    """Confidence interval of `difference`, by Student's t over prompts; None with fewer than five."""


@dataclass(frozen=True, slots=True)
class SessionPair:
    """Two rollouts of one prompt, or two named sessions."""

    first: SessionLine
    second: SessionLine
    compared: bool
    """True if both had their tokens; if not, `divergence` says nothing."""
    divergence: FirstDifference | None = None


@dataclass(frozen=True, slots=True)
class RunDiff:
    """Differences of two runs. Pairs are (first, second)."""

    sources: tuple[str, str]
    outcomes: Mapping[str, tuple[int, int]]
    rewards: RewardDiff | None
    """None if no pair has two rewards."""
    tokens: tuple[int, int]
    ledgers: tuple[Json | None, Json | None]
    pairs: Sequence[SessionPair]
    alone: tuple[int, int]
    """Sessions without a partner."""
    missing: Sequence[str] = field(default_factory=list)


def compare_runs(first: Path, second: Path, tokenizer: Path | None = None) -> RunDiff:
    """Compare the runs or stores at both paths. Raises as `look_at`."""
    views = look_at(first, tokenizer), look_at(second, tokenizer)
    missing = [f"{view.source}: {sentence}" for view in views for sentence in view.missing]
    paired = pair_lines(views[0].sessions, views[1].sessions)
    pairs = _compare(views, paired, missing)
    counts = [Counter(line.outcome or line.state or "no outcome" for line in view.sessions) for view in views]
    tokens = [sum(line.sampled or 0 for line in view.sessions) for view in views]
    return RunDiff(
        sources=(views[0].source, views[1].source),
        outcomes={name: (counts[0][name], counts[1][name]) for name in sorted(counts[0] | counts[1])},
        rewards=compare_rewards(pairs),
        tokens=(tokens[0], tokens[1]),
        ledgers=(views[0].ledger, views[1].ledger),
        pairs=pairs,
        alone=(len(views[0].sessions) - len(paired), len(views[1].sessions) - len(paired)),
        missing=missing,
    )


def pair_lines(first: Sequence[SessionLine], second: Sequence[SessionLine]) -> list[tuple[SessionLine, SessionLine]]:
    """Return the lines of both runs that stand for the same prompt and place in its group."""
    seeds = [{(line.scenario, line.seed) for line in lines if line.seed is not None} for lines in (first, second)]
    seeded = {scenario for scenario, _ in seeds[0] & seeds[1]}
    ones, others = _keyed(first, seeded), _keyed(second, seeded)
    return [(line, others[key]) for key, line in ones.items() if key in others]


def compare_sessions(
    first: tuple[Path, str], second: tuple[Path, str], tokenizer: Path | None = None
) -> tuple[SessionPair, Sequence[str]]:
    """Compare two sessions by run and name; also return what is missing. Raises `RunError`."""
    views = look_at(first[0], tokenizer), look_at(second[0], tokenizer)
    missing = [f"{view.source}: {sentence}" for view in views for sentence in view.missing]
    lines = views[0].find(first[1]), views[1].find(second[1])
    [pair] = _compare(views, [lines], missing)
    return pair, missing


def compare_rewards(pairs: Sequence[SessionPair]) -> RewardDiff | None:
    """Compare the rewards of the pairs. The result is deterministic."""
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
    count = len(both)
    firsts, seconds = sum(one for _, one, _ in both) / count, sum(other for _, _, other in both) / count
    difference = seconds - firsts
    # Each prompt's residual. A ratio estimator, since prompts may have different numbers of pairs.
    residuals = np.array([sum(each) - difference * len(each) for each in by_prompt.values()])
    interval = None
    if len(by_prompt) >= FEWEST:
        degrees = len(by_prompt) - 1
        deviation = math.sqrt(len(by_prompt) / degrees * float(residuals @ residuals)) / count
        half = t_quantile((1 + CONFIDENCE) / 2, degrees) * deviation
        interval = difference - half, difference + half
    return RewardDiff(count, len(by_prompt), (firsts, seconds), difference, interval)


def _keyed(lines: Sequence[SessionLine], seeded: Collection[str | None]) -> dict[Hashable, SessionLine]:
    keyed = _by_place([line for line in lines if line.scenario not in seeded])
    for line in lines:
        if line.scenario in seeded:
            keyed[line.scenario, line.session_id if line.seed is None else line.seed] = line
    return keyed


def _by_place(lines: Sequence[SessionLine]) -> dict[Hashable, SessionLine]:
    placed: dict[Hashable, SessionLine] = {}
    # A scenario may stand anywhere in a suite, so prompts are counted from its first one.
    begins: dict[str | None, int] = {}
    taken: Counter[tuple[str | None, int]] = Counter()
    for line in sorted(lines, key=lambda each: -1 if each.number is None else each.number):
        group = line.group or 0
        prompt = line.scenario, group - begins.setdefault(line.scenario, group)
        placed[(*prompt, line.session_id if line.number is None else taken[prompt])] = line
        taken[prompt] += 1
    return placed


def _compare(
    views: tuple[RunView, RunView], lines: Sequence[tuple[SessionLine, SessionLine]], missing: list[str]
) -> list[SessionPair]:
    tokenizers = open_tokenizer(views[0]), open_tokenizer(views[1])
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


def find_divergence(
    first: SessionView, second: SessionView, tokenizers: tuple[Tokenizer | None, Tokenizer | None]
) -> FirstDifference | None:
    """Return the first difference, or None. Raises `RunError` if the record lacks the tokens of a turn."""
    ours, theirs = ([turn for turn in each.turns if turn.asked_again or not turn.inherited] for each in (first, second))
    places: list[dict[int | None, int]] = [
        {turn.index: place for place, turn in enumerate(turns)} for turns in (ours, theirs)
    ]
    for one, other in zip(ours, theirs, strict=False):
        if places[0].get(one.parent) != places[1].get(other.parent):
            return FirstDifference(one.index, Part.PARENT)
        for part in (Part.PROMPT, Part.OUTPUT):
            ids = _ids(one, part), _ids(other, part)
            if ids[0] != ids[1]:
                return _token(one.index, part, ids, tokenizers)
    if len(ours) != len(theirs):
        return FirstDifference(max(ours, theirs, key=len)[min(len(ours), len(theirs))].index, Part.TURNS)
    return None


def _ids(turn: TurnView, part: Part) -> list[int]:
    if len(turn.output_ids) != turn.output_length or (
        turn.prompt_length and turn.parent is None and not turn.context_ids
    ):
        raise RunError(f"the tokens of turn {turn.index} are not here, only their number")
    return list(turn.context_ids if part is Part.PROMPT else turn.output_ids)


def _token(
    turn: int, part: Part, ids: tuple[list[int], list[int]], tokenizers: tuple[Tokenizer | None, Tokenizer | None]
) -> FirstDifference:
    shorter = min(map(len, ids))
    at = next((place for place, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1]), shorter)
    one, other = (each[at] if at < len(each) else None for each in ids)
    texts = [
        None if tokenizer is None else tokenizer.decode(each[max(0, at - _BEFORE) : at + _BEHIND])
        for each, tokenizer in zip(ids, tokenizers, strict=True)
    ]
    return FirstDifference(turn, part, at, (one, other), (texts[0], texts[1]))
