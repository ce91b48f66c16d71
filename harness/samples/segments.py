"""Segments: samples with all per-token values that a loss needs, prompt included.

Every column stands at the token that it describes: `behavior_logprobs[i]` is the logprob of `ids[i]`. The model has it
in its logits at i - 1, so the first token is never trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from harness.errors import SegmentError
from harness.samples.versions import NOT_SAMPLED, Versions
from harness.sampling_masks import SampleMasks
from harness.token_rows import SampleRows
from harness.top_logprobs import TopLogprobs
from harness.types import Logprobs, Sample, TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """Columns of n tokens, shape [n], read-only."""

    ids: TokenIds
    loss_mask: npt.NDArray[np.uint8]
    advantages: npt.NDArray[np.float32]
    """Valid on trained tokens only."""
    behavior_logprobs: Logprobs
    """Natural log, under the policy that sampled the token, else 0.0."""
    proximal_logprobs: Logprobs
    """Under the next policy; the behavior logprob until then (I7)."""
    behavior_versions: Versions
    """`NOT_SAMPLED` (-1) if no policy sampled the token."""
    proximal_versions: Versions
    sampling_mask: SampleMasks | None = None
    """Candidates of the tokens, whose logprobs are over them; the last tokens of a segment may have none."""
    routed_experts: SampleRows | None = None
    """Rows of the tokens; the last ones of a segment may have none."""
    teacher_tops: Mapping[str, TopLogprobs] = field(default_factory=dict)
    """Most likely tokens by teachers to train on; the last tokens of a segment may have none."""

    def between(self, start: int, stop: int) -> dict[str, Any]:
        """Return all columns of the tokens `start..stop` (end exclusive), by field."""
        masks, rows = self.sampling_mask, self.routed_experts
        return {name: getattr(self, name)[start:stop] for name in COLUMNS} | {
            "sampling_mask": None if masks is None else masks.part(start, stop),
            "routed_experts": None if rows is None else rows.between(start, stop),
            "teacher_tops": {name: top.part(start, stop) for name, top in self.teacher_tops.items()},
        }


_DTYPES: Mapping[str, npt.DTypeLike] = {
    "ids": np.int32,
    "loss_mask": np.uint8,
    "advantages": np.float32,
    "behavior_logprobs": np.float32,
    "proximal_logprobs": np.float32,
    "behavior_versions": np.int32,
    "proximal_versions": np.int32,
}

COLUMNS = tuple(_DTYPES)


@dataclass(frozen=True, slots=True, eq=False)
class Segment(TokenColumns):
    """Tokens of one sample, packed whole.

    Accepts other dtypes if no value changes. Raises `SegmentError` for unequal lengths, values that are not finite or
    do not fit, no tokens, a trained first token, or proximal values of neither the next version nor the behavior.
    """

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            object.__setattr__(self, name, _as_column(name, getattr(self, name), dtype))
        size = self.ids.size
        if not size:
            raise SegmentError("expected at least one token in a segment, got none")
        for name in COLUMNS:
            if (length := getattr(self, name).size) != size:
                raise SegmentError(f"{name} has {length} values for {size} tokens; expected one for each")
        if self.loss_mask.max() > 1:
            raise SegmentError(f"loss_mask: expected 0 and 1, got {self.loss_mask.max()}")
        if self.loss_mask[0]:
            raise SegmentError(
                "the first token is to be trained, but no logits come before it; its loss_mask must be 0"
            )
        if self.routed_experts is not None and len(self.routed_experts.states) > size:
            raise SegmentError(f"{len(self.routed_experts.states)} rows of experts for {size} tokens; expected no more")
        self._check_proximal()
        if self.sampling_mask is not None and len(self.sampling_mask.states) > size:
            raise SegmentError(f"sampling_mask has {len(self.sampling_mask.states)} masks for {size} tokens")

    def _check_proximal(self) -> None:
        is_unmet = self.proximal_versions == self.behavior_versions
        is_next = (self.proximal_versions == self.behavior_versions + 1) & (self.behavior_versions != NOT_SAMPLED)
        is_wrong = ~is_next & ~(is_unmet & (self.proximal_logprobs == self.behavior_logprobs))
        if is_wrong.any():
            at = int(np.flatnonzero(is_wrong)[0])
            raise SegmentError(
                f"token {at} has behavior version {self.behavior_versions[at]}, logprob {self.behavior_logprobs[at]},"
                f" and proximal version {self.proximal_versions[at]}, logprob {self.proximal_logprobs[at]}; expected"
                " the values of the next version, or the behavior values"
            )

    @classmethod
    def of_sample(cls, sample: Sample) -> Self:
        """Convert `sample`, with advantage 0."""
        prompt = sample.tokens.size - sample.response_length
        return cls(
            ids=sample.tokens,
            loss_mask=_after_prompt(prompt, 0, sample.loss_mask),
            advantages=np.zeros(sample.tokens.size, dtype=np.float32),
            behavior_logprobs=_after_prompt(prompt, 0.0, sample.rollout_log_probs),
            proximal_logprobs=_after_prompt(prompt, 0.0, sample.proximal_logprobs),
            behavior_versions=_after_prompt(prompt, NOT_SAMPLED, sample.behavior_versions),
            proximal_versions=_after_prompt(prompt, NOT_SAMPLED, sample.proximal_versions),
            sampling_mask=SampleMasks.join([None, sample.sampling_mask], [prompt, sample.response_length]),
            routed_experts=sample.routed_experts,
        )

    @classmethod
    def of_tokens(cls, ids: npt.ArrayLike, loss_mask: npt.ArrayLike | None = None) -> Self:
        """Build a segment to imitate: cross-entropy with weight 1, by default on all but the first token."""
        size = np.size(ids)
        mask = np.arange(size) > 0 if loss_mask is None else loss_mask
        zeros, not_sampled = np.zeros(size, dtype=np.float32), np.full(size, NOT_SAMPLED, dtype=np.int32)
        columns: Any = (ids, mask, mask, zeros, zeros, not_sampled, not_sampled)
        return cls(*columns)

    def __len__(self) -> int:
        return int(self.ids.size)

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def with_advantage(self, advantage: float | npt.NDArray[np.float32]) -> Self:
        """Set `advantage` (one, or one per token) on sampled tokens to train."""
        # Appended tokens keep the advantage of their encoder.
        is_sampled = self.behavior_versions != NOT_SAMPLED
        advantages = np.where(is_sampled, np.asarray(advantage, np.float32) * self.loss_mask, self.advantages)
        return replace(self, advantages=advantages)

    def first(self, tokens: int) -> Self:
        # Safe to cut: every value was computed from the tokens before it alone.
        return replace(self, **self.between(0, tokens))


class TooLong(StrEnum):
    """Policy for a segment longer than a pack."""

    ERROR = "error"
    """Raise `SegmentError`."""
    DROP = "drop"
    CUT = "cut"
    """Train what fits, or drop the segment if that trains nothing."""


@dataclass(frozen=True, slots=True)
class LostTokens:
    """Tokens that are in no pack."""

    trained: int = 0
    """Sampled, mask 1."""
    masked: int = 0
    """Sampled, mask 0."""
    appended: int = 0
    """Not sampled, mask 1."""
    context: int = 0
    """Not sampled, mask 0."""

    @classmethod
    def of(cls, columns: TokenColumns, start: int = 0) -> Self:
        is_trained, is_sampled = columns.loss_mask[start:] == 1, columns.behavior_versions[start:] != NOT_SAMPLED
        return cls(
            trained=int((is_trained & is_sampled).sum()),
            masked=int((~is_trained & is_sampled).sum()),
            appended=int((is_trained & ~is_sampled).sum()),
            context=int((~is_trained & ~is_sampled).sum()),
        )

    def __add__(self, other: "LostTokens") -> "LostTokens":
        return LostTokens(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class FittedSegment(NamedTuple):
    segment: Segment | None
    """None if dropped."""
    lost: LostTokens


def fit_segment(segment: Segment, packing_length: int, too_long: TooLong) -> FittedSegment:
    """Apply `too_long` to a segment beyond `packing_length`. Raises `SegmentError`."""
    if len(segment) <= packing_length:
        return FittedSegment(segment, LostTokens())
    if too_long is TooLong.ERROR:
        raise SegmentError(
            f"a segment of {len(segment)} tokens is longer than packing_length, which is {packing_length}; raise that,"
            ' limit the tokens of a session, or set too_long to "drop" or "cut"'
        )
    if too_long is TooLong.CUT and segment.loss_mask[:packing_length].any():
        return FittedSegment(segment.first(packing_length), LostTokens.of(segment, packing_length))
    return FittedSegment(None, LostTokens.of(segment))


def _as_column(name: str, values: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    try:
        given = np.asarray(values)
        with np.errstate(all="ignore"):
            column = given.astype(dtype, copy=False).view()
        is_same = given.dtype.kind in "biuf" and (column.dtype.kind == "f" or np.array_equal(column, given))
    except (TypeError, ValueError, OverflowError) as error:
        raise SegmentError(f"{name} is no column of {np.dtype(dtype)}: {error}") from error
    if column.ndim != 1:
        raise SegmentError(f"{name} has the shape {list(column.shape)}; expected one value per token")
    if not is_same:
        raise SegmentError(f"{name} holds {given.dtype} values that {np.dtype(dtype)} cannot hold")
    if not np.isfinite(column).all():
        raise SegmentError(f"{name} is not finite at token {int(np.flatnonzero(~np.isfinite(column))[0])}")
    column.flags.writeable = False
    return column


def _after_prompt(prompt: int, fill: float, response: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([np.full(prompt, fill, dtype=response.dtype), response])
