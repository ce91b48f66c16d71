"""Decide whether a finished run meets its `[checks]`. An unbalanced ledger is a bug and raises instead."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from harness.samples.proximal import NextVersions, count_next_versions
from harness.samples.rollout import OutcomeKind
from harness.samples.versions import NOT_SAMPLED, Versions
from harness.suite.record.rollout_table import RolloutRecord
from harness.suite.scenarios.scenario import Checks
from harness.types import Json, as_ids

_ENDED_BY_ITSELF = frozenset({OutcomeKind.FINISHED, OutcomeKind.LIMITED})


class Verdict(NamedTuple):
    check: str
    expected: str
    seen: str
    holds: bool


def judge(checks: Checks, records: Sequence[RolloutRecord]) -> list[Verdict]:
    """Decide a scenario's checks on its rollouts."""
    failed: dict[str, list[int]] = {}
    for record in records:
        if record.score_error:
            failed.setdefault(record.score_error, []).append(record.number)
    seen = "; ".join(f"{sessions_words(numbers)}: {error}" for error, numbers in failed.items())
    scored = Verdict("check.py", "a score for every session", seen or "all scored", not failed)
    asked = ((name, rule, getattr(checks, name)) for name, rule in _RULES.items())
    verdicts = [rule(name, expected, records) for name, rule, expected in asked if expected is not None]
    return [scored, *verdicts]


def sessions_words(numbers: Sequence[int]) -> str:
    """Format session numbers: `sessions 0-3, 7`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    listed = ", ".join("-".join(map(str, span)) for span in spans)
    return f"session{'s' if len(numbers) > 1 else ''} {listed}"


def mean_reward(records: Sequence[RolloutRecord]) -> float | None:
    """Return the mean over sessions with a reward, if any."""
    rewards = [record.reward for record in records if record.reward is not None]
    return fmean(rewards) if rewards else None


def count_dropped_turns(records: Sequence[RolloutRecord]) -> int:
    """Count turns dropped after an incomplete turn of their branch (I3)."""
    samples = (sample for record in records for sample in record.samples)
    return sum(sample["metadata"].get("dropped_trailing_turns", 0) for sample in samples)


def versions_of(sample: Json) -> tuple[Versions, Versions, int | None]:
    """Return a sample's behavior and proximal versions, and the version live when it was read."""
    behavior, proximal = as_ids(sample["behavior_versions"]), as_ids(sample["proximal_versions"])
    # Without sampled tokens, `staleness` is a metadata key of the prompt's author.
    stale = sample["metadata"].get("staleness", {}) if (behavior != NOT_SAMPLED).any() else {}
    return behavior, proximal, stale.get("newest_version")


def next_versions(records: Sequence[RolloutRecord]) -> NextVersions:
    """Count tokens that could meet their next weight version, and that did."""
    return count_next_versions(versions_of(sample) for record in records for sample in record.samples)


def _min_proximal_share(check: str, expected: float, records: Sequence[RolloutRecord]) -> Verdict:
    tokens = next_versions(records)
    seen = f"{tokens.share:.1%}, {tokens.met} of {tokens.possible} tokens"
    return Verdict(check, f"at least {expected:.1%}", seen, tokens.share >= expected)


def _min_reward_mean(check: str, expected: float, records: Sequence[RolloutRecord]) -> Verdict:
    mean = mean_reward(records)
    seen = "no rewards" if mean is None else f"{mean:.3f}"
    return Verdict(check, f"at least {expected:g}", seen, mean is not None and mean >= expected)


def _expect_dropped(check: str, expected: bool, records: Sequence[RolloutRecord]) -> Verdict:
    dropped = count_dropped_turns(records)
    return Verdict(check, "some" if expected else "none", str(dropped), (dropped > 0) is expected)


def _at_least(count: Callable[[Sequence[RolloutRecord]], int]) -> "_Rule":
    def rule(check: str, expected: int, records: Sequence[RolloutRecord]) -> Verdict:
        seen = count(records)
        return Verdict(check, f"at least {expected}", str(seen), seen >= expected)

    return rule


_Rule = Callable[..., Verdict]

_RULES: dict[str, _Rule] = {
    "min_finished": _at_least(lambda records: sum(record.outcome in _ENDED_BY_ITSELF for record in records)),
    "min_reward_mean": _min_reward_mean,
    "min_turns": _at_least(lambda records: min((record.session.turns for record in records), default=0)),
    "min_tool_calls": _at_least(lambda records: sum(record.session.tool_calls for record in records)),
    "min_truncated_turns": _at_least(lambda records: sum(record.session.truncated_turns for record in records)),
    "min_policy_versions": _at_least(
        lambda records: len(
            {v for record in records for sample in record.samples for v in sample["behavior_versions"] if v >= 0}
        )
    ),
    "min_proximal_tokens": _at_least(
        lambda records: sum(
            behavior >= 0 and proximal == behavior + 1
            for record in records
            for sample in record.samples
            for behavior, proximal in zip(sample["behavior_versions"], sample["proximal_versions"], strict=True)
        )
    ),
    "min_proximal_share": _min_proximal_share,
    "expect_dropped_trailing_turns": _expect_dropped,
}
