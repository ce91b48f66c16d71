"""Segments: what a learner trains on, as columns of one length.

A segment is a sample with everything that a loss needs at each of its tokens, prompt included. It is atomic: it goes
into a pack whole, and a learner never sees a part of it.

Every column stands at the token that it describes: `behavior_logprobs[i]` is the logprob of `ids[i]` given the tokens
before it in the segment. A model has that logprob in its logits at i - 1, so nobody can train the first token of a
segment: its mask is 0.

Packs are in `samples.packs`; this module does not know how segments come to lie in them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from harness.errors import SegmentError
from harness.samples.versions import NOT_SAMPLED, Versions
from harness.types import Logprobs, Sample, TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """Tokens in a row, with one value per token in every column; all have shape [n] and are read-only."""

    ids: TokenIds
    """int32."""
    loss_mask: npt.NDArray[np.uint8]
    """1 on tokens to train, 0 elsewhere."""
    advantages: npt.NDArray[np.float32]
    """Means something on trained tokens only."""
    behavior_logprobs: Logprobs
    """float32, natural logarithm: of the policy that sampled the token; 0.0 where none did."""
    proximal_logprobs: Logprobs
    """float32: of the policy after that one, or the behavior logprob of a token that has not met it (I7)."""
    behavior_versions: Versions
    """int32: the policy version that sampled the token; `NOT_SAMPLED` (-1) where none did."""
    proximal_versions: Versions
    """int32: the policy version that `proximal_logprobs` are of."""


_DTYPES: Mapping[str, npt.DTypeLike] = {
    "ids": np.int32,
    "loss_mask": np.uint8,
    "advantages": np.float32,
    "behavior_logprobs": np.float32,
    "proximal_logprobs": np.float32,
    "behavior_versions": np.int32,
    "proximal_versions": np.int32,
}

COLUMNS = tuple(column.name for column in fields(TokenColumns))
"""Names of the per-token columns, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment(TokenColumns):
    """The tokens of one sample, to be trained together and whole.

    Takes lists and arrays of other dtypes when no value changes. Raises `SegmentError` naming the column when one has
    another length or shape, holds something that its dtype cannot, or is not finite; when there is no token, when the
    first one is trained, or when the proximal values are neither those of the next version nor the behavior values.
    """

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            object.__setattr__(self, name, _as_column(name, getattr(self, name), dtype))
        size = self.ids.size
        if not size:
            raise SegmentError("a segment has at least one token, this one has none")
        for name in COLUMNS:
            if (length := getattr(self, name).size) != size:
                raise SegmentError(f"{name} has {length} values for {size} tokens; expected one for each")
        if self.loss_mask.max() > 1:
            raise SegmentError(f"loss_mask holds 0 and 1, this one has {self.loss_mask.max()}")
        if self.loss_mask[0]:
            raise SegmentError(
                "the first token is to be trained, but no logits come before it; its loss_mask must be 0"
            )
        self._check_proximal()

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
        """All tokens of `sample`, with advantage 0; those of the prompt are context."""
        prompt = sample.tokens.size - sample.response_length
        return cls(
            ids=sample.tokens,
            loss_mask=_after_prompt(prompt, 0, sample.loss_mask),
            advantages=np.zeros(sample.tokens.size, dtype=np.float32),
            behavior_logprobs=_after_prompt(prompt, 0.0, sample.rollout_log_probs),
            proximal_logprobs=_after_prompt(prompt, 0.0, sample.proximal_logprobs),
            behavior_versions=_after_prompt(prompt, NOT_SAMPLED, sample.behavior_versions),
            proximal_versions=_after_prompt(prompt, NOT_SAMPLED, sample.proximal_versions),
        )

    @classmethod
    def of_tokens(cls, ids: npt.ArrayLike, loss_mask: npt.ArrayLike | None = None) -> Self:
        """Tokens that nobody sampled, shape [n], to be imitated: cross-entropy with weight 1, in every loss.

        `loss_mask` says which ones; without it all but the first.
        """
        size = np.size(ids)
        mask = np.arange(size) > 0 if loss_mask is None else loss_mask
        zeros, not_sampled = np.zeros(size, dtype=np.float32), np.full(size, NOT_SAMPLED, dtype=np.int32)
        columns: Any = (ids, mask, mask, zeros, zeros, not_sampled, not_sampled)
        return cls(*columns)

    def __len__(self) -> int:
        return int(self.ids.size)

    @property
    def trained_tokens(self) -> int:
        """How many of its tokens have loss mask 1."""
        return int(self.loss_mask.sum())

    def with_advantage(self, advantage: float | npt.NDArray[np.float32]) -> Self:
        """This segment, with `advantage` on every sampled token to train: known when the group of its sample is whole.

        One for all, or one per token. Tokens that an encoder appended keep theirs.
        """
        is_sampled = self.behavior_versions != NOT_SAMPLED
        advantages = np.where(is_sampled, np.asarray(advantage, np.float32) * self.loss_mask, self.advantages)
        return replace(self, advantages=advantages)

    def first(self, tokens: int) -> Self:
        """Its first `tokens` tokens, every value as it was: each was computed from the tokens before it alone."""
        return replace(self, **{name: getattr(self, name)[:tokens] for name in COLUMNS})


class TooLong(StrEnum):
    """What becomes of a segment that is longer than a pack."""

    ERROR = "error"
    """`SegmentError` names the lengths: training stops."""
    DROP = "drop"
    """It is left out."""
    CUT = "cut"
    """Its first tokens are trained, as many as a pack holds; left out when none of them is to be trained."""


@dataclass(frozen=True, slots=True)
class LostTokens:
    """Tokens of segments that are in no pack, by what a ledger had counted them as."""

    trained: int = 0
    """Sampled, with loss mask 1: trained until now, dropped as too long from now on."""
    masked: int = 0
    """Sampled, with loss mask 0."""
    appended: int = 0
    """Loss mask 1, sampled by nobody: an encoder wrote them."""
    context: int = 0
    """Neither sampled nor trained: prompts, results of tools."""

    @classmethod
    def of(cls, columns: TokenColumns, start: int = 0) -> Self:
        """Those of `columns` from `start` on."""
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
    """A segment that a pack can hold, and what that took."""

    segment: Segment | None
    """None when it is left out."""
    lost: LostTokens


def fit_segment(segment: Segment, packing_length: int, too_long: TooLong) -> FittedSegment:
    """`segment`, or what `too_long` makes of it when it has more than `packing_length` tokens.

    Raises `SegmentError` when that is an error.
    """
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
    """`values` as a read-only array of `dtype`; the same memory where it has that dtype already."""
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
