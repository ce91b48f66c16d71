"""Step budget: rollouts per optimizer step, and each rank's share. Pure."""

from dataclasses import dataclass
from typing import Self

from harness.errors import StepError


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Exact number of rollouts per step, over all ranks, in whole groups.

    Raises `StepError` for values below 1 or a partial group.
    """

    rollouts_per_step: int
    group_size: int = 1

    def __post_init__(self) -> None:
        if self.rollouts_per_step < 1 or self.group_size < 1:
            raise StepError(f"rollouts_per_step and group_size are at least 1, these are {self}")
        if self.rollouts_per_step % self.group_size:
            raise StepError(
                f"rollouts_per_step is {self.rollouts_per_step}, which is no multiple of group_size, {self.group_size}"
            )

    @classmethod
    def derive(cls, per_device_batch: int, world_size: int, gradient_accumulation: int, group_size: int = 1) -> Self:
        """Return the budget that equals the global batch of a trainer."""
        return cls(per_device_batch * world_size * gradient_accumulation, group_size)

    @classmethod
    def cover(cls, rollouts: int, per_device_batch: int, world_size: int, group_size: int = 1) -> Self:
        """Return the smallest such budget of at least `rollouts`."""
        batch = per_device_batch * world_size
        if batch < 1:
            raise StepError(f"per_device_batch times world_size is at least 1, this is {batch}")
        return cls.derive(per_device_batch, world_size, -(-rollouts // batch), group_size)

    @property
    def groups(self) -> int:
        """Number over all ranks."""
        return self.rollouts_per_step // self.group_size

    def slice_of(self, rank: int, world_size: int) -> range:
        """Return the groups of `rank`, possibly none. Raises `StepError`."""
        if not 0 <= rank < world_size:
            raise StepError(f"expected a rank from 0 to {world_size - 1}, got {rank}")
        return range(self.groups * rank // world_size, self.groups * (rank + 1) // world_size)
