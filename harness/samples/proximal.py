"""Proximal logprobs: the logprob of every sampled token under the next policy version (I7).

A token sampled under version v waits for v + 1. A scoring under v + 1 settles it for good; any other leaves it alone.
An unsettled token keeps its behavior values (importance weight 1). Redundant scorings are harmless.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from msgspec import structs

from harness.samples.versions import NOT_SAMPLED, Versions, expand_spans, version_of
from harness.types import Logprobs, PromptLogprobs, Sample, Turn, VersionSpan, as_ids, as_logprobs

# Positions are absolute in a branch: token 0 is the first of its first prompt, and the output of a turn begins at its
# `prompt_length`. Environment tokens and tokens that a guard forced never change. The caller ensures that a scoring has
# one version, the scale of the behavior logprobs, and the tokens of the branch.
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ProximalColumns:
    """Tokens from position `start` of their branch, shape [n]."""

    start: int
    behavior_versions: Versions
    """`NOT_SAMPLED` for tokens that never change."""
    logprobs: Logprobs
    versions: Versions

    @classmethod
    def of_output(cls, start: int, logprobs: Logprobs, spans: Iterable[VersionSpan]) -> Self:
        versions = as_ids(expand_spans(spans, logprobs.size))
        return cls(start, versions, logprobs, versions)

    @classmethod
    def of_turn(cls, turn: Turn) -> Self:
        sampled = cls.of_output(turn.prompt_length, turn.logprobs, turn.version_spans)
        behavior = sampled.behavior_versions.copy()
        behavior[behavior.size - turn.forced_tokens :] = NOT_SAMPLED
        logprobs = sampled.logprobs if turn.proximal_logprobs is None else turn.proximal_logprobs
        versions = sampled.versions if turn.proximal_versions is None else turn.proximal_versions
        return cls(turn.prompt_length, as_ids(behavior), logprobs, versions)

    @classmethod
    def of_sample(cls, sample: Sample) -> Self:
        start = sample.tokens.size - sample.response_length
        return cls(start, sample.behavior_versions, sample.proximal_logprobs, sample.proximal_versions)

    def extend(self, logprobs: Logprobs, spans: Iterable[VersionSpan]) -> Self:
        """Append a segment; `spans` count from its first token."""
        more = self.of_output(self.start + self.logprobs.size, logprobs, spans)
        return replace(
            self,
            behavior_versions=as_ids(np.concatenate([self.behavior_versions, more.behavior_versions])),
            logprobs=as_logprobs(np.concatenate([self.logprobs, more.logprobs])),
            versions=as_ids(np.concatenate([self.versions, more.versions])),
        )

    def waiting(self, version: int) -> _Mask:
        """Mask the tokens that a scoring under `version` settles."""
        is_next = (self.behavior_versions == version - 1) & (self.behavior_versions != NOT_SAMPLED)
        waiting: _Mask = is_next & (self.versions == self.behavior_versions)
        return waiting

    def waiting_window(self, version: int) -> range | None:
        positions = np.flatnonzero(self.waiting(version))
        return range(self.start + int(positions[0]), self.start + int(positions[-1]) + 1) if positions.size else None

    def settle(self, scoring: PromptLogprobs) -> Self:
        """Apply `scoring`. Return self if nothing changes."""
        version = version_of(scoring)
        position = np.arange(self.start, self.start + self.logprobs.size) - scoring.start
        settled = self.waiting(version) & (position >= 0) & (position < scoring.logprobs.size)
        if not settled.any():
            return self
        logprobs, versions = self.logprobs.copy(), self.versions.copy()
        logprobs[settled] = scoring.logprobs[position[settled]]
        versions[settled] = version
        return replace(self, logprobs=as_logprobs(logprobs), versions=as_ids(versions))


def waiting_window(turns: Iterable[Turn], version: int) -> range | None:
    """Return the range of branch positions that wait for `version`, or None."""
    # Begins at 1 or later in a branch with a prompt, as `TokenProvider.score` requires.
    windows = [window for columns in _candidates(turns, version) if (window := columns.waiting_window(version))]
    return range(min(each.start for each in windows), max(each.stop for each in windows)) if windows else None


def scoring_start(turns: Iterable[Turn], version: int) -> int | None:
    """Return the first position to score for `version`, or None."""
    window = waiting_window(turns, version)
    return None if window is None else window.start


def waiting_tokens(turns: Iterable[Turn], version: int) -> int:
    return sum(int(columns.waiting(version).sum()) for columns in _candidates(turns, version))


def score_turns(turns: Iterable[Turn], scoring: PromptLogprobs) -> list[Turn]:
    """Return the turns of one branch that `scoring` changes, updated."""
    # A turn that branches share is settled once, for all of them.
    changed = []
    for turn in _candidate_turns(turns, version_of(scoring)):
        before = ProximalColumns.of_turn(turn)
        after = before.settle(scoring)
        if after is not before:
            changed.append(structs.replace(turn, proximal_logprobs=after.logprobs, proximal_versions=after.versions))
    return changed


def keep_scores(turn: Turn, earlier: Turn) -> Turn:
    """Copy the scores of `earlier` to `turn`, an unscored continuation of the same output."""
    if earlier.proximal_logprobs is None or earlier.proximal_versions is None:
        return turn
    own, kept = ProximalColumns.of_turn(turn), min(earlier.output_ids.size, turn.output_ids.size)
    logprobs = np.concatenate([earlier.proximal_logprobs[:kept], own.logprobs[kept:]])
    versions = np.concatenate([earlier.proximal_versions[:kept], own.versions[kept:]])
    return structs.replace(turn, proximal_logprobs=as_logprobs(logprobs), proximal_versions=as_ids(versions))


def sample_scoring_start(sample: Sample, version: int) -> int | None:
    """Return `scoring_start` for a sample outside its session."""
    window = ProximalColumns.of_sample(sample).waiting_window(version)
    return None if window is None else window.start


def score_sample(sample: Sample, scoring: PromptLogprobs) -> Sample:
    """Apply `scoring`, with positions in `sample.tokens`. Count lags from its version."""
    after = ProximalColumns.of_sample(sample).settle(scoring)
    scored = replace(sample, proximal_logprobs=after.logprobs, proximal_versions=after.versions)
    stale = staleness(after.behavior_versions, after.versions, version_of(scoring))
    return scored if stale is None else replace(scored, metadata={**sample.metadata, "staleness": stale.to_json()})


class Staleness(NamedTuple):
    newest_version: int
    lag_min: int
    lag_mean: float
    lag_max: int
    proximal_share: float
    """Share of sampled tokens that met their next version."""

    def to_json(self) -> dict[str, Any]:
        return self._asdict()


def staleness(behavior: Versions, proximal: Versions, live: int | None) -> Staleness | None:
    """Compute the lag, if any token was sampled."""
    is_sampled = behavior != NOT_SAMPLED
    if not is_sampled.any():
        return None
    sampled = behavior[is_sampled]
    # The live version may be unknown, or older on an engine that restarts its count: no lag is below 0.
    newest = max(int(sampled.max()), NOT_SAMPLED if live is None else live)
    return Staleness(
        newest,
        lag_min=newest - int(sampled.max()),
        lag_mean=newest - float(sampled.mean()),
        lag_max=newest - int(sampled.min()),
        proximal_share=float((proximal[is_sampled] == sampled + 1).mean()),
    )


def staleness_telemetry(samples: Iterable[tuple[Versions, Versions, int | None]]) -> dict[str, float]:
    """Aggregate (behavior versions, proximal versions, live version) of samples."""
    return join_staleness(
        (stale, int((b != NOT_SAMPLED).sum())) for b, p, live in samples if (stale := staleness(b, p, live))
    )


def join_staleness(samples: Iterable[tuple[Staleness, int]]) -> dict[str, float]:
    """Aggregate (staleness, sampled tokens) under fixed keys."""
    found = list(samples)
    tokens = sum(weight for _, weight in found) or 1
    return {
        "rollout/version_lag_min": min((stale.lag_min for stale, _ in found), default=0),
        "rollout/version_lag_mean": sum(stale.lag_mean * weight for stale, weight in found) / tokens,
        "rollout/version_lag_max": max((stale.lag_max for stale, _ in found), default=0),
        "rollout/proximal_share": sum(stale.proximal_share * weight for stale, weight in found) / tokens,
    }


class NextVersions(NamedTuple):
    possible: int
    """Sampled tokens whose next version has been live."""
    met: int

    @property
    def share(self) -> float:
        return self.met / self.possible if self.possible else 0.0


def count_next_versions(samples: Iterable[tuple[Versions, Versions, int | None]]) -> NextVersions:
    """Count over (behavior versions, proximal versions, live version) of samples."""
    newest, met = NOT_SAMPLED, 0
    missed: Counter[int] = Counter()
    for behavior, proximal, live in samples:
        is_sampled = behavior != NOT_SAMPLED
        own, next_one = behavior[is_sampled], proximal[is_sampled]
        has_met = next_one == own + 1
        met += int(has_met.sum())
        for version, count in zip(*np.unique(own[~has_met], return_counts=True), strict=True):
            missed[int(version)] += int(count)
        newest = max(newest, NOT_SAMPLED if live is None else live, int(next_one.max(initial=NOT_SAMPLED)))
    return NextVersions(met + sum(count for version, count in missed.items() if version < newest), met)


def oldest_version(spans: Iterable[VersionSpan]) -> int | None:
    return min((version_of(span) for span in spans), default=None)


def _candidates(turns: Iterable[Turn], version: int) -> Iterator[ProximalColumns]:
    return (ProximalColumns.of_turn(turn) for turn in _candidate_turns(turns, version))


def _candidate_turns(turns: Iterable[Turn], version: int) -> Iterator[Turn]:
    # Looks only at spans, so a turn without a waiting token is cheap at any length.
    return (turn for turn in turns if any(version_of(span) == version - 1 for span in turn.version_spans))
