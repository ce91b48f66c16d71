"""Gradients of a step, in flat buckets, summed over packs. Ranks sync once per step, bucket by bucket."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import LearnerError

BUCKET_BYTES = 25 * 2**20
"""Same as torch's DistributedDataParallel."""


class Gradients:
    """Gradients of `parameters` and `numbers`, equal on all ranks. Raises `LearnerError` for unsupported dtypes."""

    def __init__(self, parameters: Sequence[Tensor], numbers: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        # Gradients are sums over many tokens: half precision would lose the small ones.
        dtypes = {parameter.dtype for parameter in parameters}
        if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
            found = ", ".join(sorted(map(str, dtypes))) or "none at all"
            raise LearnerError(f"expected trained parameters of float32 or of float64, got {found}; load them in one")
        self._numbers = numbers
        groups: list[list[Tensor]] = [[]]
        for parameter in parameters:
            if groups[-1] and sum(each.nbytes for each in groups[-1]) + parameter.nbytes > bucket_bytes:
                groups.append([])
            groups[-1].append(parameter)
        self._buckets = [_as_gradients_of(group, numbers if group is groups[-1] else 0) for group in groups]

    def sum_over_ranks(self, numbers: Sequence[float]) -> list[float]:
        """Sum gradients and `numbers` over all ranks, which must all call it. Return the sums of `numbers`.

        Numbers are rounded to the parameters' precision. Raises `LearnerError` if a rank is lost or times out.
        """
        # Numbers travel behind the last bucket, so the normalizer costs no extra round. In float32, counts are exact up
        # to 16 777 216.
        room = self._buckets[-1][-self._numbers :]
        room.copy_(torch.tensor(numbers, dtype=room.dtype))
        if dist.is_initialized():
            try:
                for work in [dist.all_reduce(bucket, async_op=True) for bucket in self._buckets]:
                    work.wait()
            except RuntimeError as error:
                raise LearnerError(f"another rank did not come to the end of the step: {error}") from error
        sums: list[float] = room.tolist()
        room.zero_()
        return sums

    def scale(self, factor: float) -> None:
        for bucket in self._buckets:
            bucket.mul_(factor)

    def norm(self) -> float:
        return float(torch.stack([torch.linalg.vector_norm(bucket) for bucket in self._buckets]).norm())

    def clear(self) -> None:
        for bucket in self._buckets:
            bucket.zero_()


def _as_gradients_of(parameters: Sequence[Any], room: int) -> Tensor:
    # Each `grad` is a view: backward passes add without copies, and a rank without packs has zeros.
    flat: Tensor = parameters[0].new_zeros(sum(each.numel() for each in parameters) + room)
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat
