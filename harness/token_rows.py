"""Rows stored with tokens: the experts that a model's layers chose, and the ids that were candidates for a token (I12).

The row of experts at position p comes from the pass that reads the token at p, so its weights are those of the next
sampled token. A request over n tokens has n - 1 rows: its last token is read by a later request, if at all. So a turn
holds the rows from the last token before it up to its own last but one.

A position keeps the row of the request that first computed it: the row of a later prefill explains no sampled token. A
row that no request returned stays missing.

A mask, the candidates of a sampled token, stands at that token itself. Masks differ in length, so they are ragged:
values end to end, with offsets.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, chain
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from harness.decoding import read_msgpack

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")  # Qwen, DeepSeek and GLM, Mixtral

RowValues = npt.NDArray[np.unsignedinteger[Any]]
"""Expert ids, shape [tokens, layers, top_k], in the narrowest unsigned dtype."""
MaskIds = npt.NDArray[np.integer[Any]]
"""Token ids of masks end to end, in the narrowest unsigned dtype once they are checked."""


Offsets = npt.NDArray[np.int32]
"""Borders of ragged rows: from 0, one more than rows."""


class RowState(IntEnum):
    """State of one position's row."""

    NOT_READ = 0
    """No request has read the token; of a mask: no request has sampled it."""
    PRESENT = 1
    NOT_RETURNED = 2
    """The request that read the token ended without rows."""
    LOST = 3
    """The request that read the token broke."""
    OTHER_SHAPE = 4
    """The row is of another model than the sample's first one."""


class RoutedExperts(NamedTuple):
    """Router of a model."""

    layers: int
    top_k: int
    experts: int
    """Ids are valid in `0..experts-1`."""

    @classmethod
    def of_config(cls, config: Any) -> Self | None:
        """Return the router that a model's configuration describes; None for a dense or unknown one."""
        try:
            config = config.get("text_config", config)
            experts = next(config[name] for name in _EXPERTS if name in config)
            return cls(int(config["num_hidden_layers"]), int(config["num_experts_per_tok"]), int(experts))
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
            return None

    @property
    def dtype(self) -> npt.DTypeLike:
        """Narrowest dtype of an id."""
        return np.uint8 if self.experts <= 1 << 8 else np.uint16


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    start: int
    """Position of the first token in its branch, from 0."""
    values: RowValues

    @property
    def stop(self) -> int:
        return self.start + len(self.values)

    def until(self, stop: int) -> Self:
        return replace(self, values=self.values[: max(0, stop - self.start)])


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRows:
    """Rows of different lengths: the row of the token at `start + i` is `values[offsets[i] : offsets[i + 1]]`."""

    start: int
    values: MaskIds
    offsets: Offsets

    @classmethod
    def of(cls, start: int, rows: Sequence[Sequence[int] | MaskIds]) -> Self:
        offsets = offsets_of([len(row) for row in rows])
        return cls(start, np.fromiter(chain.from_iterable(rows), np.int32, int(offsets[-1])), offsets)

    @property
    def stop(self) -> int:
        return self.start + len(self.offsets) - 1

    def until(self, stop: int) -> Self:
        offsets = self.offsets[: max(0, stop - self.start) + 1]
        return replace(self, values=self.values[: offsets[-1]], offsets=offsets)


@dataclass(frozen=True, slots=True)
class MissingRows:
    """Positions `start..stop` (end exclusive) whose rows no request returned."""

    start: int
    stop: int
    state: RowState

    def until(self, stop: int) -> Self:
        return replace(self, stop=max(self.start, min(self.stop, stop)))


@dataclass(frozen=True, slots=True)
class TurnRows:
    """Rows of one turn: experts or masks."""

    start: int
    """Position of the last token before the turn, at least 0; of masks, of its first output token."""
    parts: tuple[TokenRows | RaggedRows | MissingRows, ...] = ()
    """One for each request with output, without gap or overlap."""

    @property
    def stop(self) -> int:
        """First position to ask the next request for."""
        return self.parts[-1].stop if self.parts else self.start

    def join(self, rows: TokenRows | RaggedRows | None, stop: int, missing: RowState) -> Self:
        """Append what a request with output returned for the positions up to `stop`; None is `missing`."""
        part = MissingRows(self.stop, stop, missing) if rows is None else rows
        return replace(self, parts=(*self.parts, part))

    def until(self, stop: int) -> Self:
        return replace(self, parts=tuple(part.until(stop) for part in self.parts if part.start < stop))

    @property
    def gap(self) -> int:
        """Position of the first missing row, else `stop`."""
        return next((part.start for part in self.parts if isinstance(part, MissingRows)), self.stop)

    @property
    def size_bytes(self) -> int:
        return sum(part.values.nbytes for part in self.parts if not isinstance(part, MissingRows))

    @property
    def missing(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for part in self.parts:
            if isinstance(part, MissingRows):
                counts[part.state.name.lower()] += part.stop - part.start
        return dict(counts)

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode([self.start, [_write_part(part) for part in self.parts]])

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        """Decode `to_bytes`. Raises `ValueError`."""
        start, parts = read_msgpack(blob, tuple[int, list[list[Any]]])
        return cls(start, tuple(_read_part(*part) for part in parts))


class RecordedRows(NamedTuple):
    """All rows of one turn, as a store keeps them."""

    experts: TurnRows | None
    masks: TurnRows | None

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode([None if each is None else each.to_bytes() for each in self])

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        """Decode `to_bytes`. Raises `ValueError`."""
        kept = read_msgpack(blob, tuple[bytes | None, bytes | None])
        return cls(*(None if each is None else TurnRows.from_bytes(each) for each in kept))


def offsets_of(lengths: npt.ArrayLike) -> Offsets:
    """Return the offsets of rows with these lengths."""
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])


def _write_part(part: TokenRows | RaggedRows | MissingRows) -> list[Any]:
    if isinstance(part, MissingRows):
        return [part.start, part.stop, int(part.state)]
    values = [part.start, part.values.dtype.str, part.values.shape, np.ascontiguousarray(part.values).data]
    return values if isinstance(part, TokenRows) else [*values, part.offsets.data]


def _read_part(
    start: int, second: Any, third: Any, data: bytes | None = None, offsets: bytes | None = None
) -> TokenRows | RaggedRows | MissingRows:
    if data is None:
        return MissingRows(start, second, RowState(third))
    values = np.frombuffer(data, second).reshape(third)
    return TokenRows(start, values) if offsets is None else RaggedRows(start, values, np.frombuffer(offsets, np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class SampleRows:
    """Rows of a sample, one for each token."""

    values: RowValues
    """0 where missing; shape [tokens, 0, 0] if all are."""
    states: npt.NDArray[np.uint8]
    """`RowState` of each token."""

    @classmethod
    def of_turns(cls, turns: Iterable[TurnRows], size: int) -> Self:
        parts = [part for turn in turns for part in turn.parts]
        filled = [part for part in parts if isinstance(part, TokenRows)]
        shape, dtype = (filled[0].values.shape[1:], filled[0].values.dtype) if filled else ((0, 0), np.dtype(np.uint8))
        values, states = np.zeros((size, *shape), dtype), np.full(size, RowState.NOT_READ, np.uint8)
        for part in parts:
            if isinstance(part, MissingRows):
                state = part.state
            elif part.values.shape[1:] != shape or part.values.dtype != dtype:
                state = RowState.OTHER_SHAPE
            else:
                state, values[part.start : part.stop] = RowState.PRESENT, part.values
            states[part.start : part.stop] = state
        return cls(values, states)

    @classmethod
    def join(cls, samples: Sequence[Self | None], sizes: Sequence[int]) -> Self | None:
        """Concatenate the rows of samples with `sizes` tokens, which may have rows of fewer; None if none has any."""
        shaped = [rows for rows in samples if rows is not None]
        if not shaped:
            return None
        like = next((rows.values for rows in shaped if rows.values.size), shaped[0].values)
        values, states = np.zeros((sum(sizes), *like.shape[1:]), like.dtype), np.zeros(sum(sizes), np.uint8)
        for rows, start in zip(samples, accumulate(sizes, initial=0), strict=False):
            if rows is None:
                continue
            own = slice(start, start + len(rows.states))
            if is_like := rows.values.shape[1:] == like.shape[1:] and rows.values.dtype == like.dtype:
                values[own] = rows.values
            states[own] = np.where(is_like | (rows.states != RowState.PRESENT), rows.states, RowState.OTHER_SHAPE)
        return cls(values, states)

    def first(self, tokens: int) -> Self:
        return self.between(0, tokens)

    def between(self, start: int, stop: int) -> Self:
        """Return the rows of the tokens `start..stop` (end exclusive)."""
        return replace(self, values=self.values[start:stop], states=self.states[start:stop])

    def equals(self, other: Self) -> bool:
        return np.array_equal(self.values, other.values) and np.array_equal(self.states, other.states)

    @property
    def missing(self) -> dict[str, int]:
        """Count the missing rows by state, without the last token's."""
        states, counts = np.unique(self.states[:-1], return_counts=True)
        named: Sequence[tuple[int, int]] = list(zip(states.tolist(), counts.tolist(), strict=True))
        return {RowState(state).name.lower(): count for state, count in named if state != RowState.PRESENT}

    def to_plain(self) -> dict[str, Any]:
        """Return dtype, shape, and the bytes of both arrays in C order."""
        return {
            "dtype": self.values.dtype.newbyteorder("<").str,
            "shape": list(self.values.shape),
            "values": self.values.astype(self.values.dtype.newbyteorder("<"), copy=False).tobytes(),
            "states": self.states.tobytes(),
        }

    @classmethod
    def from_plain(cls, dtype: str, shape: Sequence[int], values: bytes, states: bytes) -> Self:
        """Decode `to_plain`. Raises `ValueError`, `TypeError`."""
        read = np.frombuffer(values, dtype).reshape(shape)
        if len(states) != len(read):
            raise ValueError(f"expected one state for each of {len(read)} rows, got {len(states)}")
        return cls(read, np.frombuffer(states, np.uint8))
