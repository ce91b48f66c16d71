"""Packs: segments one behind the other, without padding, as one forward pass takes them.

A pack is what `flash_attn_varlen_func`, `torch.nn.attention.varlen` and the data collators of transformers call a
flattened batch: ids in a row, `cu_seqlens` with the borders, positions that begin again at 0 in every segment.
Attention must not cross a border, so a learner hands `cu_seqlens` to its kernel, or builds a block-diagonal mask.

Columns stay at the token they describe (`samples.segments`), also at borders. Learners that shift a whole row by one
would predict the first token of a segment from the last one of the segment before it; here that token is never trained,
and `logit_positions` says where the logits of each trained token are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from harness.errors import SegmentError
from harness.samples.segments import COLUMNS, Segment, TokenColumns

Positions = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Pack(TokenColumns):
    """Whole segments, concatenated: n tokens of k segments."""

    cu_seqlens: npt.NDArray[np.int32]
    """int32 [k + 1]: segment j is tokens `cu_seqlens[j]..cu_seqlens[j + 1]`; begins with 0, ends with n."""
    position_ids: Positions
    """int32 [rows, n]: the place of each token in its segment, from 0.

    One row for most models. Models of the Qwen-VL kind take four (text, time, height, width), which are equal for
    text; with fewer than four rows they would not separate the segments. Pass `position_ids[:, None]` there.
    """
    numbers: npt.NDArray[np.int64]
    """int64 [k]: the place of each segment in what was packed."""

    @classmethod
    def of(cls, segments: Sequence[Segment], numbers: Sequence[int], position_rows: int = 1) -> Self:
        """`segments` in this order; `numbers` says which ones they are. Raises `SegmentError` when there are none."""
        if not segments:
            raise SegmentError("a pack has at least one segment")
        lengths = [len(segment) for segment in segments]
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        return cls(
            **{name: _read_only(np.concatenate([getattr(each, name) for each in segments])) for name in COLUMNS},
            cu_seqlens=_read_only(np.cumsum([0, *lengths], dtype=np.int32)),
            position_ids=_read_only(np.tile(positions, (position_rows, 1))),
            numbers=_read_only(np.asarray(numbers, dtype=np.int64)),
        )

    def __len__(self) -> int:
        return int(self.ids.size)

    @property
    def max_seqlen(self) -> int:
        """Tokens of its longest segment."""
        return int(np.diff(self.cu_seqlens).max())

    @property
    def logit_positions(self) -> npt.NDArray[np.int64]:
        """Where the logits of the trained tokens are: one position before each, never in another segment.

        int64 [trained]; the tokens themselves are `ids[logit_positions + 1]`, and so are the values of the columns.
        """
        return np.flatnonzero(self.loss_mask) - 1

    def segments(self) -> list[Segment]:
        """The segments that it was made of."""
        borders = zip(self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True)
        return [Segment(**{name: getattr(self, name)[start:end] for name in COLUMNS}) for start, end in borders]

    def digest(self) -> str:
        """blake2b-128 of the borders and all columns, 32 hex digits: two packs with one digest train the same.

        The numbers of its segments are not part of it.
        """
        state = blake2b(self.cu_seqlens.astype("<i4").tobytes(), digest_size=16)
        for name in COLUMNS:
            column = getattr(self, name)
            state.update(column.astype(column.dtype.newbyteorder("<")).tobytes())
        return state.hexdigest()


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
