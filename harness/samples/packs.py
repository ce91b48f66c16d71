"""Packs: segments concatenated without padding, for one forward pass.

Attention must not cross a border: a learner passes `cu_seqlens` to its kernel, or builds a block-diagonal mask. Columns
stay at the token that they describe. `PackStream` builds packs while the step is being generated, by lengths and order
of segments alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from harness.errors import SegmentError
from harness.samples.packing import fill_room
from harness.samples.segments import COLUMNS, Segment, TokenColumns
from harness.sampling_masks import SampleMasks
from harness.token_rows import SampleRows
from harness.top_logprobs import TopLogprobs

Positions = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pack(TokenColumns):
    """n tokens of k whole segments."""

    cu_seqlens: npt.NDArray[np.int32]
    """int32 [k + 1]: borders, from 0 to n."""
    # Usually one row. Models of the Qwen-VL kind take four (text, time, height, width), equal for text; with fewer they
    # would not separate the segments. Pass `position_ids[:, None]` there.
    position_ids: Positions
    """int32 [rows, n]: index of each token in its segment."""
    numbers: npt.NDArray[np.int64]
    """int64 [k]: segment indices in the packing input."""

    @classmethod
    def of(cls, segments: Sequence[Segment], numbers: Sequence[int], position_rows: int = 1) -> Self:
        """Concatenate `segments`, numbered `numbers`. Raises `SegmentError` for none."""
        if not segments:
            raise SegmentError("expected at least one segment in a pack, got none")
        lengths = [len(segment) for segment in segments]
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        return cls(
            **{name: _read_only(np.concatenate([getattr(each, name) for each in segments])) for name in COLUMNS},
            cu_seqlens=_read_only(np.cumsum([0, *lengths], dtype=np.int32)),
            position_ids=_read_only(np.tile(positions, (position_rows, 1))),
            numbers=_read_only(np.asarray(numbers, dtype=np.int64)),
            sampling_mask=SampleMasks.join([each.sampling_mask for each in segments], lengths),
            routed_experts=SampleRows.join([each.routed_experts for each in segments], lengths),
            teacher_tops=TopLogprobs.join([each.teacher_tops for each in segments], lengths),
        )

    def __len__(self) -> int:
        return int(self.ids.size)

    @property
    def max_seqlen(self) -> int:
        return int(np.diff(self.cu_seqlens).max())

    @property
    def logit_positions(self) -> npt.NDArray[np.int64]:
        """int64 [trained]: one before each trained token, `ids[logit_positions + 1]`."""
        # Never in another segment: the first token of a segment is not trained. Learners that shift a whole row by one
        # would predict it from the segment before.
        return np.flatnonzero(self.loss_mask) - 1

    def segments(self) -> list[Segment]:
        return [Segment(**self.between(start, end)) for start, end in pairwise(self.cu_seqlens.tolist())]

    def digest(self) -> str:
        """Return the blake2b-128 of borders and columns in hex."""
        state = blake2b(self.cu_seqlens.astype("<i4").tobytes(), digest_size=16)
        for name in COLUMNS:
            column = getattr(self, name)
            state.update(column.astype(column.dtype.newbyteorder("<")).tobytes())
        if self.sampling_mask is not None:
            plain = self.sampling_mask.to_plain()
            state.update(plain["values"] + plain["offsets"])
        if self.routed_experts is not None:
            plain = self.routed_experts.to_plain()
            state.update(plain["values"] + plain["states"])
        for name, top in self.teacher_tops.items():
            plain = top.to_plain()
            state.update(name.encode() + plain["ids"] + plain["logprobs"])
        return state.hexdigest()


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


class PackStream:
    """Segments in, packs out. Between calls, fewer wait than fit into one pack in order plus `lookahead`.

    Raises `SegmentError` when `packing_length` is below 1 or `lookahead` below 0.
    """

    def __init__(self, packing_length: int, lookahead: int = 64, position_rows: int = 1) -> None:
        if packing_length < 1 or lookahead < 0:
            raise SegmentError(f"expected packing_length >= 1 and lookahead >= 0, got {packing_length} and {lookahead}")
        self.packing_length = packing_length
        self.lookahead = lookahead
        self._position_rows = position_rows
        self._waiting: list[tuple[int, Segment]] = []  # with their numbers, in order of arrival
        self._count = 0
        self._due = 0  # waiting segments that fit into one pack in order
        self._due_tokens = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, segment: Segment) -> Pack | None:
        """Add a segment; return the next pack, if any. Raises `SegmentError`, with no change, if it exceeds a pack."""
        if len(segment) > self.packing_length:
            raise SegmentError(
                f"segment {self._count} has {len(segment)} tokens; packing_length is {self.packing_length}"
            )
        self._waiting.append((self._count, segment))
        self._count += 1
        self._extend_due()
        behind = len(self._waiting) - self._due
        return self._take_pack() if behind >= max(self.lookahead, 1) else None

    def finish(self) -> Iterator[Pack]:
        """Yield the remaining packs. The stream can be reused."""
        while self._waiting:
            yield self._take_pack()

    def _extend_due(self) -> None:
        for _, segment in self._waiting[self._due :]:
            if self._due_tokens + len(segment) > self.packing_length:
                return
            self._due += 1
            self._due_tokens += len(segment)

    def _take_pack(self) -> Pack:
        # Take the oldest segment, so none waits forever, then those that fill the pack best: up to `lookahead` segments
        # that are due may yield to later ones. Without lookahead packs fill in order (next fit).
        fixed = max(1, self._due - self.lookahead)
        room = self.packing_length - sum(len(segment) for _, segment in self._waiting[:fixed])
        lengths = [len(segment) for _, segment in self._waiting[fixed : self._due + self.lookahead]]
        places = [*range(fixed), *(fixed + place for place in fill_room(lengths, room))]
        numbers, segments = zip(*(self._waiting[place] for place in places), strict=True)
        for place in reversed(places):
            del self._waiting[place]
        self._due = self._due_tokens = 0
        self._extend_due()
        return Pack.of(segments, numbers, self._position_rows)
