"""The gradient of a step: a sum over packs, then over ranks, in a few flat buckets.

Each parameter's `grad` is a view into a bucket, so backward passes add to the buckets, nothing is copied, and a rank
without a pack has zeros. Ranks meet once per step, with one all-reduce per bucket. Behind the last bucket is room for
numbers of the step that are summed along with the gradient, the normalizer among them: nobody asks for them first.

Gradients are sums over many tokens, so parameters are float32 or float64; half precision would lose the small ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import LearnerError

BUCKET_BYTES = 25 * 2**20
"""That of torch's own DistributedDataParallel."""


class Gradients:
    """The gradients of `parameters`, which have to be the same on every rank, and `numbers` numbers beside them.

    Raises `LearnerError` for parameters of several dtypes or of half precision.
    """

    def __init__(self, parameters: Sequence[Tensor], numbers: int, bucket_bytes: int = BUCKET_BYTES) -> None:
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
        """Replace the gradient by its sum over all ranks; returns the sums of `numbers`, one by one.

        Every rank of the default process group has to call it; without one there is a single rank. Numbers are rounded
        to the precision of the parameters: counts are exact up to 16 777 216 in float32. Raises `LearnerError` when
        another rank is lost, or does not come within the timeout of the group.
        """
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
        """Multiply it."""
        for bucket in self._buckets:
            bucket.mul_(factor)

    def norm(self) -> float:
        """Euclidean; not finite when an element is not."""
        return float(torch.stack([torch.linalg.vector_norm(bucket) for bucket in self._buckets]).norm())

    def clear(self) -> None:
        """Back to zeros."""
        for bucket in self._buckets:
            bucket.zero_()

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self._buckets)


def _as_gradients_of(parameters: Sequence[Any], room: int) -> Tensor:
    """One bucket, zeros, with `room` elements behind the gradients."""
    flat: Tensor = parameters[0].new_zeros(sum(each.numel() for each in parameters) + room)
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat
