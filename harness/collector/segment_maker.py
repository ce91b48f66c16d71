"""From a rollout that a step trains to the segments that a learner gets, with an account of every token. Pure.

Whatever is not trained is named: samples that are older than allowed, segments that do not fit into a pack, and what an
encoder drops or cuts. The counts of a rollout's samples add up to what its session's ledger has as trained and masked:
a turn that several samples share counts in the first of them.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.collector.rollout_index import ScoredRollout
from harness.collector.sample_account import SegmentedSample, StepDropReason
from harness.collector.sampling_scale import forget_constrained
from harness.errors import SegmentError, StepError
from harness.samples.encoders import EncodedSample, SegmentEncoder, WholeSampleEncoder, require_sampled_prefix
from harness.samples.proximal import staleness
from harness.samples.rollout import Rollout
from harness.samples.segments import Segment, TooLong, fit_segment
from harness.samples.versions import NOT_SAMPLED
from harness.types import Sample


class MadeSegment(NamedTuple):
    """What was made of a sample."""

    segment: Segment | None
    facts: SegmentedSample
    counts: dict[str, int]
    """What the encoder has counted."""


@dataclass(frozen=True, slots=True)
class SegmentMaker:
    """Segments of at most `packing_length` tokens. Raises `StepError` when a bound makes no sense."""

    packing_length: int
    encoder: SegmentEncoder = field(default_factory=WholeSampleEncoder)
    too_long: TooLong = TooLong.ERROR
    max_staleness: int = 0
    """How many versions the oldest trained token of a sample may lie behind the live one."""

    def __post_init__(self) -> None:
        if self.packing_length < 1 or self.max_staleness < 0:
            raise StepError(
                f"packing_length is at least 1 and max_staleness at least 0, these are {self.packing_length} and"
                f" {self.max_staleness}"
            )

    def try_out(self, rollout: Rollout) -> None:
        """Whether segments can be made of `rollout` once it is due.

        Raises `SegmentError` when its encoder raises, or touches what was sampled: the rollout is of no use. Raises
        `StepError` for a segment that is too long where that is an error: nothing can be trained as it was asked for.
        """
        for sample in rollout.samples:
            self._fit(self._encode(rollout, sample).segment)

    def make(self, scored: ScoredRollout, advantage: float, version: int) -> Iterator[MadeSegment]:
        """What becomes of each sample of `scored` while `version` is the live policy; raises like `try_out`."""
        seen: set[int] = set()
        for number, sample in enumerate(scored.rollout.samples):
            turns = set(sample.metadata.get("turns", ()))
            yield self._make(scored, number, advantage, version, seen & turns)
            seen |= turns

    def _make(
        self, scored: ScoredRollout, number: int, advantage: float, version: int, shared: Collection[int]
    ) -> MadeSegment:
        rollout, sample = scored.rollout, scored.rollout.samples[number]
        trained_versions = sample.behavior_versions[sample.loss_mask == 1]
        is_stale = trained_versions.size and version - int(trained_versions.min()) > self.max_staleness
        encoded = EncodedSample(None, StepDropReason.STALE) if is_stale else self._encode(rollout, sample)
        segment = self._fit(encoded.segment)

        is_own = np.ones(sample.tokens.size, dtype=bool)
        for turn in rollout.session.get("turns", ()):
            if turn["turn"] in shared:
                is_own[turn["prompt_length"] : turn["prompt_length"] + turn["output_length"]] = False
        prompt = sample.tokens.size - sample.response_length
        own_sampled = is_own[prompt:] & (sample.behavior_versions != NOT_SAMPLED)
        encoded_tokens, tokens = _count(encoded.segment, is_own), _count(segment, is_own)
        lost = {
            encoded.reason or StepDropReason.CUT_BY_ENCODER: int(own_sampled.sum()) - encoded_tokens.sampled,
            StepDropReason.TOO_LONG: encoded_tokens.sampled - tokens.sampled,
        }
        facts = SegmentedSample(
            rollout=scored.index,
            sample=number,
            advantage=advantage,
            tokens=0 if segment is None else len(segment),
            trained=tokens.trained,
            masked=tokens.masked,
            appended=tokens.appended,
            reason="" if segment is not None else encoded.reason or StepDropReason.TOO_LONG,
            dropped={reason: tokens for reason, tokens in lost.items() if tokens},
            staleness=staleness(sample.behavior_versions, sample.proximal_versions, version),
            dropped_turns=sample.metadata.get("dropped_trailing_turns", 0),
            repeat_terminated=sample.repeat_terminated,
        )
        if segment is not None:
            segment = forget_constrained(segment.with_advantage(advantage), rollout, sample)
        return MadeSegment(segment, facts, dict(encoded.counts))

    def _encode(self, rollout: Rollout, sample: Sample) -> EncodedSample:
        try:
            encoded = self.encoder.encode(rollout, sample)
            if encoded.segment is not None:
                require_sampled_prefix(encoded.segment, sample)
        except Exception as error:  # the code of somebody else: its rollout is of no use, and the step goes on
            raise SegmentError(f"the encoder failed: {type(error).__name__}: {error}") from error
        return encoded

    def _fit(self, segment: Segment | None) -> Segment | None:
        try:
            return None if segment is None else fit_segment(segment, self.packing_length, self.too_long).segment
        except SegmentError as error:
            raise StepError(error.message) from error


class _Tokens(NamedTuple):
    """Tokens of a segment; sampled ones only where they are its own."""

    trained: int = 0
    masked: int = 0
    appended: int = 0

    @property
    def sampled(self) -> int:
        return self.trained + self.masked


def _count(segment: Segment | None, is_own: npt.NDArray[np.bool_]) -> _Tokens:
    if segment is None:
        return _Tokens()
    is_sampled, is_trained = segment.behavior_versions != NOT_SAMPLED, segment.loss_mask == 1
    own = is_sampled & np.resize(is_own, len(segment))  # what is longer than the sample was appended, not sampled
    return _Tokens(
        trained=int((own & is_trained).sum()),
        masked=int((own & ~is_trained).sum()),
        appended=int((is_trained & ~is_sampled).sum()),
    )
