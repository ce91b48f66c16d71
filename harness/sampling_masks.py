"""Sampling masks of a sample: the ids that were candidates for each sampled token (I12).

Under top-p, top-k or min-p an engine samples from a few candidates. The token's behavior logprob is over them, and a
trainer that normalizes over the same ids finds it again; over the whole vocabulary it trains another policy.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from harness.token_rows import MaskIds, MissingRows, Offsets, RaggedRows, RowState, TurnRows, offsets_of


@dataclass(frozen=True, slots=True, eq=False)
class SampleMasks:
    """One mask for each token: `values[offsets[i] : offsets[i + 1]]`. Raises `ValueError` for misfits."""

    values: MaskIds
    """Token ids, shape [ids]."""
    offsets: Offsets
    """Shape [tokens + 1]; equal neighbors where the mask is missing."""
    states: npt.NDArray[np.uint8]
    """`RowState` of each mask."""

    def __post_init__(self) -> None:
        size, offsets = len(self.states), self.offsets
        if len(offsets) != size + 1 or offsets[0] or offsets[-1] != len(self.values) or (np.diff(offsets) < 0).any():
            raise ValueError(f"expected {size + 1} ascending offsets from 0 to {len(self.values)}, got {offsets!r:.80}")

    @classmethod
    def of_turns(cls, turns: Iterable[TurnRows], start: int, size: int) -> Self:
        """Join the masks of a branch with `size` tokens, from position `start` on."""
        lengths, states = np.zeros(size, np.int32), np.full(size, RowState.NOT_READ, np.uint8)
        values: list[MaskIds] = [np.zeros(0, np.uint8)]
        for part in (part for turn in turns for part in turn.parts):
            if isinstance(part, RaggedRows):
                lengths[part.start : part.stop] = np.diff(part.offsets)
                values.append(part.values)
            states[part.start : part.stop] = part.state if isinstance(part, MissingRows) else RowState.PRESENT
        return cls(np.concatenate(values), offsets_of(lengths[start:]), states[start:])

    @classmethod
    def join(cls, parts: Sequence["SampleMasks | None"], tokens: Sequence[int]) -> Self | None:
        """Return the masks of parts with `tokens` each, which may lack the last ones; None if no part has some."""
        known = [(start, part) for start, part in zip(offsets_of(tokens), parts, strict=False) if part is not None]
        lengths, states = np.zeros(sum(tokens), np.int32), np.full(sum(tokens), RowState.NOT_READ, np.uint8)
        for start, part in known:
            own = slice(start, start + len(part.states))
            lengths[own], states[own] = np.diff(part.offsets), part.states
        return cls(np.concatenate([part.values for _, part in known]), offsets_of(lengths), states) if known else None

    def part(self, start: int, stop: int) -> Self:
        """Return the masks of the tokens `start..stop` (end exclusive)."""
        offsets = self.offsets[start : stop + 1]
        values = self.values[offsets[0] : offsets[-1]]
        return replace(self, values=values, offsets=offsets - offsets[0], states=self.states[start:stop])

    def at(self, positions: npt.NDArray[np.integer[Any]]) -> Self:
        lengths, offsets = np.diff(self.offsets)[positions], self.offsets[positions]
        chosen = offsets_of(lengths)
        places = np.arange(chosen[-1]) + np.repeat(offsets - chosen[:-1], lengths)
        return type(self)(self.values[places], chosen, self.states[positions])

    @property
    def missing(self) -> dict[str, int]:
        """Count the missing masks of sampled tokens by state."""
        counts = Counter(map(RowState, self.states.tolist()))
        return {state.name.lower(): counts[state] for state in (RowState.NOT_RETURNED, RowState.LOST) if counts[state]}

    def to_plain(self) -> dict[str, Any]:
        """Return the dtype of the ids, and the bytes of all arrays, little-endian."""
        dtype = self.values.dtype.newbyteorder("<")
        return {
            "dtype": dtype.str,
            "values": self.values.astype(dtype, copy=False).tobytes(),
            "offsets": self.offsets.astype("<i4", copy=False).tobytes(),
            "states": self.states.tobytes(),
        }

    @classmethod
    def from_plain(cls, dtype: str, values: bytes, offsets: bytes, states: bytes) -> Self:
        """Decode `to_plain`. Raises `ValueError`, `TypeError`."""
        return cls(np.frombuffer(values, dtype), np.frombuffer(offsets, "<i4"), np.frombuffer(states, np.uint8))
