"""Packs: segments concatenated without padding, for one forward pass.

Attention must not cross a border: a learner passes `cu_seqlens` to its kernel, or builds a block-diagonal mask. Columns
stay at the token that they describe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from harness.errors import SegmentError
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
