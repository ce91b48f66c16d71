"""A model's most likely tokens at each position: alternatives of a turn, a teacher's top-k."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

MISSING = -1
"""Id where a token is missing; its logprob is NaN."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """`ids` int32 [n, k], `logprobs` float32 [n, k], best first."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    def part(self, start: int, stop: int) -> Self:
        """Return the rows `start..stop` (end exclusive)."""
        return type(self)(self.ids[start:stop], self.logprobs[start:stop])

    @classmethod
    def join(cls, parts: Sequence[Mapping[str, Self]], tokens: Sequence[int]) -> dict[str, Self]:
        """Return by name the rows of parts with `tokens` each, which may lack the last ones, or the name."""
        joined: dict[str, Self] = {}
        for name in sorted({name for part in parts for name in part}):
            shape = (sum(tokens), max(part[name].ids.shape[1] for part in parts if name in part))
            ids, logprobs = np.full(shape, MISSING, np.int32), np.full(shape, np.nan, np.float32)
            for start, part in zip(np.cumsum([0, *tokens]).tolist(), parts, strict=False):
                if (own := part.get(name)) is not None:
                    rows, count = own.ids.shape
                    ids[start : start + rows, :count] = own.ids
                    logprobs[start : start + rows, :count] = own.logprobs
            joined[name] = cls(ids, logprobs)
        return joined

    def to_plain(self) -> dict[str, Any]:
        """Return k, and the bytes of both arrays, little-endian."""
        return {
            "k": self.ids.shape[1],
            "ids": self.ids.astype("<i4", copy=False).tobytes(),
            "logprobs": self.logprobs.astype("<f4", copy=False).tobytes(),
        }

    @classmethod
    def from_plain(cls, k: int, ids: bytes, logprobs: bytes) -> Self:
        """Decode `to_plain`. Raises `ValueError`, `TypeError`."""
        tops = cls(np.frombuffer(ids, "<i4").reshape(-1, k), np.frombuffer(logprobs, "<f4").reshape(-1, k))
        if tops.ids.shape != tops.logprobs.shape:
            raise ValueError(f"expected as many logprobs as ids, got {tops.logprobs.shape} and {tops.ids.shape}")
        return tops
