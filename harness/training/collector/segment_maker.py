"""Segment maker: from a rollout to segments. Pure. Accounts sum to the trained and masked tokens of its ledger."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.errors import SegmentError, StepError
from harness.samples.delivery import SampleDelivery, turn_spans
from harness.samples.encoders import EncodedSample, SegmentEncoder, WholeSampleEncoder, require_sampled_prefix
from harness.samples.proximal import Staleness, staleness
from harness.samples.rollout import Rollout
from harness.samples.segments import Segment, TooLong, fit_segment
from harness.samples.turn_rewards import earned_rewards, spread_over_tokens
from harness.samples.versions import NOT_SAMPLED
from harness.top_logprobs import MISSING, TopLogprobs
from harness.training.collector.groups import Advantage, RolloutIndex, ScoredRollout
from harness.training.collector.sampling_scale import forget_constrained
from harness.types import Sample


class StepDropReason(StrEnum):
    """Reason why delivered tokens are not trained; encoders add more."""

    FILTERED = "filtered"
    OVER_SAMPLED = "over_sampled"
    """Group not needed."""
    STALE = "stale"
    """Older than `max_staleness` allows."""
    TOO_LONG = "too_long"
    """Does not fit into a pack."""
    FAILED_ROLLOUT = "failed_rollout"
    """Rollout replaced, or counted untrained."""
    CUT_BY_ENCODER = "cut_by_encoder"
    INTERRUPTED = "interrupted"
    """Session in no step."""


@dataclass(frozen=True, slots=True)
class SegmentedSample:
    """Account of a sample. Tokens shared with an earlier sample count there."""

    rollout: RolloutIndex
    sample: int
    advantage: Advantage
    tokens: int
    """Prompt and appended included."""
    trained: int
    """Sampled, loss mask 1."""
    masked: int
    """Sampled, loss mask 0, not stale."""
    appended: int = 0
    """Trained, not sampled."""
    reason: str = ""
    """Why it has no segment."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Sampled, but not in the segment or stale."""
    staleness: Staleness | None = None
    dropped_turns: int = 0
    """By the merge rule (I3)."""
    repeat_terminated: int = 0
    teacher_gaps: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Sum of behavior minus teacher's logprobs, and their number, by teacher."""

    @property
    def sampled(self) -> int:
        return self.trained + self.masked + sum(self.dropped.values())


class MadeSegment(NamedTuple):
    """A sample's segment, if any, and its account."""

    segment: Segment | None
    facts: SegmentedSample
    counts: dict[str, int]
    """Encoder counters."""


class Stale(StrEnum):
    MASK = "mask"
    """Mask the stale tokens only."""
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class SegmentMaker:
    """Maker of segments. Raises `StepError` for invalid limits."""

    packing_length: int
    encoder: SegmentEncoder = field(default_factory=WholeSampleEncoder)
    too_long: TooLong = TooLong.ERROR
    max_staleness: int = 0
    """Largest lag of a trained token, in versions."""
    staleness: Stale = Stale.MASK
    teachers: Mapping[str, float] = field(default_factory=dict)
    """Weight of each teacher in a token's advantage; the most likely tokens of one with `top_k` go to the learner."""

    def __post_init__(self) -> None:
        if self.packing_length < 1 or self.max_staleness < 0:
            raise StepError(
                f"expected packing_length >= 1 and max_staleness >= 0, got {self.packing_length} and"
                f" {self.max_staleness}"
            )

    def try_out(self, rollout: Rollout) -> None:
        """Check that `rollout` can become segments.

        Raises `SegmentError` if the encoder raises or changes sampled values, `StepError` for a segment that is too
        long under `TooLong.ERROR`.
        """
        for sample in rollout.samples:
            self._fit(self._encode(rollout, sample).segment)

    def make(self, scored: ScoredRollout, advantage: Advantage, version: int) -> Iterator[MadeSegment]:
        """Yield a segment per sample while policy `version` is live. Raises like `try_out`."""
        rollout = scored.rollout
        delivery = SampleDelivery(rollout.samples)
        tried: list[_TriedSample] = []
        for sample in rollout.samples:
            tried.append(self._try(rollout, delivery.mask(sample), version))
            if tried[-1].segment is not None:
                delivery.take(sample)
        own: dict[int, set[int]] = {}
        counted: set[int] = set()
        # Samples with a segment first: a shared turn counts in the first of them.
        for number in sorted(range(len(tried)), key=lambda number: tried[number].segment is None):
            turns = {turn for turn, _ in turn_spans(tried[number].sample)}
            own[number] = turns - counted
            counted |= turns
        for number, each in enumerate(tried):
            yield self._account(scored, number, each, advantage, version=version, own=own[number])

    def _try(self, rollout: Rollout, sample: Sample, version: int) -> "_TriedSample":
        is_old = version - sample.behavior_versions[sample.loss_mask == 1] > self.max_staleness
        is_stale = is_old.size and (is_old.all() if self.staleness is Stale.MASK else is_old.any())
        encoded = EncodedSample(None, StepDropReason.STALE) if is_stale else self._encode(rollout, sample)
        fitted = segment = self._fit(encoded.segment)
        if segment is not None and is_old.any():
            is_new = version - segment.behavior_versions <= self.max_staleness
            is_new |= segment.behavior_versions == NOT_SAMPLED
            segment = replace(segment, loss_mask=segment.loss_mask * is_new)
            segment = segment if segment.trained_tokens else None
        return _TriedSample(sample, encoded, fitted, segment)

    def _account(
        self,
        scored: ScoredRollout,
        number: int,
        tried: "_TriedSample",
        advantage: Advantage,
        *,
        version: int,
        own: Collection[int],
    ) -> MadeSegment:
        rollout = scored.rollout
        sample, encoded, fitted, segment = tried
        is_own = np.ones(sample.tokens.size, dtype=bool)
        prompt = sample.tokens.size - sample.response_length
        for turn, span in turn_spans(sample):
            is_own[prompt + span.start : prompt + span.stop] = turn in own
        own_sampled = is_own[prompt:] & (sample.behavior_versions != NOT_SAMPLED)
        encoded_tokens, fitted_tokens = _count(encoded.segment, is_own), _count(fitted, is_own)
        tokens = _count(segment, is_own)
        stale = fitted_tokens.sampled if segment is None else fitted_tokens.trained - tokens.trained
        lost = {
            encoded.reason or StepDropReason.CUT_BY_ENCODER: int(own_sampled.sum()) - encoded_tokens.sampled,
            StepDropReason.TOO_LONG: encoded_tokens.sampled - fitted_tokens.sampled,
        }
        lost[StepDropReason.STALE] = lost.get(StepDropReason.STALE, 0) + stale
        facts = SegmentedSample(
            rollout=scored.index,
            sample=number,
            advantage=advantage,
            tokens=0 if segment is None else len(segment),
            trained=tokens.trained,
            masked=0 if segment is None else tokens.masked - stale,
            appended=tokens.appended,
            reason=""
            if segment is not None
            else encoded.reason or (StepDropReason.STALE if fitted is not None else StepDropReason.TOO_LONG),
            dropped={reason: tokens for reason, tokens in lost.items() if tokens},
            staleness=staleness(sample.behavior_versions, sample.proximal_versions, version),
            dropped_turns=sample.metadata.get("dropped_trailing_turns", 0),
            repeat_terminated=sample.repeat_terminated,
            teacher_gaps={name: _gap(sample, name) for name in self.teachers},
        )
        if segment is not None:
            column = advantage if isinstance(advantage, int | float) else _by_token(advantage, rollout, sample)
            # A segment that is longer than its sample ends with appended tokens, which keep their own.
            column = np.resize(column, len(segment)).astype(np.float32)
            kept = min(len(segment), sample.tokens.size) - prompt
            column[prompt : prompt + kept] += taught_advantages(sample, self.teachers)[:kept]
            segment = forget_constrained(segment.with_advantage(column), rollout, sample)
            tops = {name: top.part(0, kept) for name, top in sample.teacher_tops.items() if name in self.teachers}
            segment = replace(segment, teacher_tops=TopLogprobs.join([{}, tops], [prompt, kept]))
        return MadeSegment(segment, facts, dict(encoded.counts))

    def _encode(self, rollout: Rollout, sample: Sample) -> EncodedSample:
        try:
            encoded = self.encoder.encode(rollout, sample)
            if encoded.segment is not None:
                require_sampled_prefix(encoded.segment, sample)
        except Exception as error:  # user code: its rollout is replaced, and the step continues
            raise SegmentError(f"the encoder failed: {type(error).__name__}: {error}") from error
        return encoded

    def _fit(self, segment: Segment | None) -> Segment | None:
        try:
            return None if segment is None else fit_segment(segment, self.packing_length, self.too_long).segment
        except SegmentError as error:
            raise StepError(error.message) from error


def taught_advantages(sample: Sample, weights: Mapping[str, float]) -> npt.NDArray[np.float32]:
    """Return each response token's advantage by its teachers: weight times (teacher's minus behavior logprob).

    It has the policy gradient of the token's reverse KL divergence (arXiv:2306.08543). 0 where a logprob is missing,
    and where a teacher's `teacher_tops` are there. Raises `StepError` for a sample without that teacher.
    """
    advantages = np.zeros(sample.response_length, np.float32)
    for name, weight in weights.items():
        gaps, tops = np.nan_to_num(_gaps(sample, name)), sample.teacher_tops.get(name)
        advantages -= weight * (gaps if tops is None else np.where(tops.ids[:, 0] == MISSING, gaps, 0))
    return advantages


def _gaps(sample: Sample, name: str) -> npt.NDArray[np.float32]:
    if name not in sample.teachers:
        raise StepError(f"teacher {name}: expected its logprobs in each sample, found {sorted(sample.teachers)}")
    return sample.rollout_log_probs - sample.teachers[name]


def _gap(sample: Sample, name: str) -> tuple[float, int]:
    gaps = _gaps(sample, name)[sample.loss_mask == 1]
    return float(np.nansum(gaps)), int((~np.isnan(gaps)).sum())


def _by_token(advantages: Sequence[float], rollout: Rollout, sample: Sample) -> npt.NDArray[np.float32]:
    turns = earned_rewards(rollout.samples, 0.0)
    response = spread_over_tokens(sample, dict(zip(turns, advantages, strict=True)))
    return np.concatenate([np.zeros(sample.tokens.size - sample.response_length, dtype=np.float32), response])


class _TriedSample(NamedTuple):
    sample: Sample
    encoded: EncodedSample
    fitted: Segment | None  # within the packing length
    segment: Segment | None  # without stale tokens; None if nothing is left to train


class _TokenCounts(NamedTuple):
    trained: int = 0
    masked: int = 0
    appended: int = 0

    @property
    def sampled(self) -> int:
        return self.trained + self.masked


def _count(segment: Segment | None, is_own: npt.NDArray[np.bool_]) -> _TokenCounts:
    if segment is None:
        return _TokenCounts()
    is_sampled, is_trained = segment.behavior_versions != NOT_SAMPLED, segment.loss_mask == 1
    own = is_sampled & np.resize(is_own, len(segment))  # the part beyond the sample was appended
    return _TokenCounts(
        trained=int((own & is_trained).sum()),
        masked=int((own & ~is_trained).sum()),
        appended=int((is_trained & ~is_sampled).sum()),
    )
