"""The logprob of every sampled token under the policy after its own (I7), caught while that policy is live.

A token sampled under version v waits for exactly one other version, v + 1. A scoring computed under v + 1 settles it,
once and for good; a scoring under any other version leaves it alone; and a token that never meets v + 1 keeps its
behavior values in both columns (importance weight 1). There is no third state. So whoever scores may score too much,
too early, too late or twice: `settle` takes from a scoring what is right and nothing else.

Positions are absolute in a branch: token 0 is the first of its first prompt. The outputs of a turn begin at its
`prompt_length`, so the turns of a branch can be looked at one by one and in any selection; environment tokens lie
between them and are never touched, nor are tokens that a guard forced.

This module cannot see everything, and leaves to its callers: that a scoring is of one version, that its scale is that
of the behavior logprobs, and that its tokens are those of the branch.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from harness.samples.versions import NOT_SAMPLED, Versions, expand_spans, version_of
from harness.types import Logprobs, PromptLogprobs, Sample, Turn, VersionSpan, as_ids, as_logprobs

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ProximalColumns:
    """Tokens in a row, the first of them at position `start` of its branch; all columns have shape [n]."""

    start: int
    behavior_versions: Versions
    """`NOT_SAMPLED` for tokens that no scoring may change."""
    logprobs: Logprobs
    """Proximal; the behavior logprob of a token that has not met its next version."""
    versions: Versions
    """The version each logprob was computed under."""

    @classmethod
    def of_output(cls, start: int, logprobs: Logprobs, spans: Iterable[VersionSpan]) -> Self:
        """Sampled tokens as an engine reports them. Raises `UnknownWeightVersion`."""
        versions = as_ids(expand_spans(spans, logprobs.size))
        return cls(start, versions, logprobs, versions)

    @classmethod
    def of_turn(cls, turn: Turn) -> Self:
        """The output of `turn`. Raises `UnknownWeightVersion`."""
        sampled = cls.of_output(turn.prompt_length, turn.logprobs, turn.version_spans)
        behavior = sampled.behavior_versions.copy()
        behavior[behavior.size - turn.forced_tokens :] = NOT_SAMPLED
        logprobs = sampled.logprobs if turn.proximal_logprobs is None else turn.proximal_logprobs
        versions = sampled.versions if turn.proximal_versions is None else turn.proximal_versions
        return cls(turn.prompt_length, as_ids(behavior), logprobs, versions)

    @classmethod
    def of_sample(cls, sample: Sample) -> Self:
        """The response of `sample`; environment tokens in between are `NOT_SAMPLED`."""
        start = sample.tokens.size - sample.response_length
        return cls(start, sample.behavior_versions, sample.proximal_logprobs, sample.proximal_versions)

    def extend(self, logprobs: Logprobs, spans: Iterable[VersionSpan]) -> Self:
        """These tokens, and after them those of the next segment; `spans` count from its first token."""
        more = self.of_output(self.start + self.logprobs.size, logprobs, spans)
        return replace(
            self,
            behavior_versions=as_ids(np.concatenate([self.behavior_versions, more.behavior_versions])),
            logprobs=as_logprobs(np.concatenate([self.logprobs, more.logprobs])),
            versions=as_ids(np.concatenate([self.versions, more.versions])),
        )

    def waiting(self, version: int) -> _Mask:
        """Which tokens a scoring under `version` settles: sampled one version earlier, and not yet scored."""
        is_next = (self.behavior_versions == version - 1) & (self.behavior_versions != NOT_SAMPLED)
        waiting: _Mask = is_next & (self.versions == self.behavior_versions)
        return waiting

    def waiting_window(self, version: int) -> range | None:
        """From the first to the last position that waits for `version`; None when none does."""
        positions = np.flatnonzero(self.waiting(version))
        return range(self.start + int(positions[0]), self.start + int(positions[-1]) + 1) if positions.size else None

    def settle(self, scoring: PromptLogprobs) -> Self:
        """These tokens after `scoring`; the same object when it settles none of them."""
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
    """From the first to the last position of a branch whose token waits for `version`; None when no token does.

    Begins at 1 or later in a branch with a prompt, as `TokenProvider.score` wants it. A turn without a token of the
    version before costs a look at its spans, whatever its length.
    """
    windows = [window for columns in _candidates(turns, version) if (window := columns.waiting_window(version))]
    return range(min(each.start for each in windows), max(each.stop for each in windows)) if windows else None


def scoring_start(turns: Iterable[Turn], version: int) -> int | None:
    """Where a request that goes on with a branch has to begin scoring; None when nothing waits for `version`."""
    window = waiting_window(turns, version)
    return None if window is None else window.start


def waiting_tokens(turns: Iterable[Turn], version: int) -> int:
    """How many tokens of `turns` wait for `version`."""
    return sum(int(columns.waiting(version).sum()) for columns in _candidates(turns, version))


def score_turns(turns: Iterable[Turn], scoring: PromptLogprobs) -> list[Turn]:
    """Those of `turns`, all of one branch, that `scoring` changes, changed.

    A turn that other branches share is changed once: it is the same turn there, and settled from then on.
    """
    changed = []
    for turn in _candidate_turns(turns, version_of(scoring)):
        before = ProximalColumns.of_turn(turn)
        after = before.settle(scoring)
        if after is not before:
            changed.append(replace(turn, proximal_logprobs=after.logprobs, proximal_versions=after.versions))
    return changed


def keep_scores(turn: Turn, earlier: Turn) -> Turn:
    """`turn`, a later outcome of `earlier` whose output goes on where that one broke off, with the scores of that one.

    No scoring has changed `turn` yet. Tokens that only `earlier` has were cut away, and their scores with them.
    """
    if earlier.proximal_logprobs is None or earlier.proximal_versions is None:
        return turn
    own, kept = ProximalColumns.of_turn(turn), min(earlier.output_ids.size, turn.output_ids.size)
    logprobs = np.concatenate([earlier.proximal_logprobs[:kept], own.logprobs[kept:]])
    versions = np.concatenate([earlier.proximal_versions[:kept], own.versions[kept:]])
    return replace(turn, proximal_logprobs=as_logprobs(logprobs), proximal_versions=as_ids(versions))


def sample_scoring_start(sample: Sample, version: int) -> int | None:
    """Like `scoring_start`, for a sample that has left its session."""
    window = ProximalColumns.of_sample(sample).waiting_window(version)
    return None if window is None else window.start


def score_sample(sample: Sample, scoring: PromptLogprobs) -> Sample:
    """`sample` after `scoring`, whose positions count from the first of `sample.tokens`.

    Its lags count from the version of the scoring, which is live by then.
    """
    after = ProximalColumns.of_sample(sample).settle(scoring)
    scored = replace(sample, proximal_logprobs=after.logprobs, proximal_versions=after.versions)
    stale = staleness(after.behavior_versions, after.versions, version_of(scoring))
    return scored if stale is None else replace(scored, metadata={**sample.metadata, "staleness": stale.to_json()})


class Staleness(NamedTuple):
    """How far the sampled tokens of a sample lie behind a policy version."""

    newest_version: int
    """The version that the lags are counted from."""
    lag_min: int
    lag_mean: float
    lag_max: int
    proximal_share: float
    """Share of the sampled tokens whose proximal logprob is that of their next version."""

    def to_json(self) -> dict[str, Any]:
        """The form in a sample's metadata."""
        return self._asdict()


def staleness(behavior: Versions, proximal: Versions, live: int | None) -> Staleness | None:
    """The statistics of tokens sampled under `behavior` and scored under `proximal`; None when none was sampled.

    Lags are counted from the version that is `live`, or from the newest one that sampled a token when the live one is
    not known or, on an engine that counts anew, older: no lag is below 0.
    """
    is_sampled = behavior != NOT_SAMPLED
    if not is_sampled.any():
        return None
    sampled = behavior[is_sampled]
    newest = max(int(sampled.max()), NOT_SAMPLED if live is None else live)
    return Staleness(
        newest,
        lag_min=newest - int(sampled.max()),
        lag_mean=newest - float(sampled.mean()),
        lag_max=newest - int(sampled.min()),
        proximal_share=float((proximal[is_sampled] == sampled + 1).mean()),
    )


def staleness_telemetry(samples: Iterable[tuple[Versions, Versions, int | None]]) -> dict[str, float]:
    """Figures that a trainer logs of many samples: each is its behavior versions, its proximal ones, the live one.

    Keys are fixed. Every sample counts by its tokens.
    """
    return join_staleness(
        (stale, int((b != NOT_SAMPLED).sum())) for b, p, live in samples if (stale := staleness(b, p, live))
    )


def join_staleness(samples: Iterable[tuple[Staleness, int]]) -> dict[str, float]:
    """The same of samples whose staleness and sampled tokens are known."""
    found = list(samples)
    tokens = sum(weight for _, weight in found) or 1
    return {
        "rollout/version_lag_min": min((stale.lag_min for stale, _ in found), default=0),
        "rollout/version_lag_mean": sum(stale.lag_mean * weight for stale, weight in found) / tokens,
        "rollout/version_lag_max": max((stale.lag_max for stale, _ in found), default=0),
        "rollout/proximal_share": sum(stale.proximal_share * weight for stale, weight in found) / tokens,
    }


class NextVersions(NamedTuple):
    """How many tokens could meet the version after their own, and how many did."""

    possible: int
    """Sampled tokens whose next version has been live: any later one says so."""
    met: int
    """Those whose proximal logprob is that of it."""

    @property
    def share(self) -> float:
        """Met, of those that could; 0 when none could."""
        return self.met / self.possible if self.possible else 0.0


def count_next_versions(samples: Iterable[tuple[Versions, Versions, int | None]]) -> NextVersions:
    """Of samples of one run of versions: each is its behavior versions, its proximal ones, the one that was live."""
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
    """The oldest policy version in `spans`; None when there are none."""
    return min((version_of(span) for span in spans), default=None)


def _candidates(turns: Iterable[Turn], version: int) -> Iterator[ProximalColumns]:
    return (ProximalColumns.of_turn(turn) for turn in _candidate_turns(turns, version))


def _candidate_turns(turns: Iterable[Turn], version: int) -> Iterator[Turn]:
    """The turns with a token that the version before `version` sampled."""
    return (turn for turn in turns if any(version_of(span) == version - 1 for span in turn.version_spans))
