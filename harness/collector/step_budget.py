"""How many rollouts make an optimizer step, and which of them a rank collects. Pure."""

from dataclasses import dataclass
from typing import Self

from harness.errors import StepError


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Exactly `rollouts_per_step` raw rollouts make a step, over all ranks together, in whole groups.

    Raises `StepError` when one of the two is below 1, or the budget is no multiple of the group size.
    """

    rollouts_per_step: int
    group_size: int = 1
    """Rollouts of one prompt, which are delivered together."""

    def __post_init__(self) -> None:
        if self.rollouts_per_step < 1 or self.group_size < 1:
            raise StepError(f"rollouts_per_step and group_size are at least 1, these are {self}")
        if self.rollouts_per_step % self.group_size:
            raise StepError(
                f"rollouts_per_step is {self.rollouts_per_step}, which is no multiple of group_size, {self.group_size}"
            )

    @classmethod
    def derive(cls, per_device_batch: int, world_size: int, gradient_accumulation: int, group_size: int = 1) -> Self:
        """The global batch of a trainer that counts in batches: their product."""
        return cls(per_device_batch * world_size * gradient_accumulation, group_size)

    @classmethod
    def cover(cls, rollouts: int, per_device_batch: int, world_size: int, group_size: int = 1) -> Self:
        """The least such product that is at least `rollouts`; may be more than was asked for."""
        batch = per_device_batch * world_size
        if batch < 1:
            raise StepError(f"per_device_batch times world_size is at least 1, this is {batch}")
        return cls.derive(per_device_batch, world_size, -(-rollouts // batch), group_size)

    @property
    def groups(self) -> int:
        """Groups of a step, over all ranks."""
        return self.rollouts_per_step // self.group_size

    def slice_of(self, rank: int, world_size: int) -> range:
        """The groups of a step that `rank` collects, 0 to `groups` over all ranks; a rank may have none.

        Raises `StepError` unless `rank` is one of `world_size`.
        """
        if not 0 <= rank < world_size:
            raise StepError(f"expected a rank from 0 to {world_size - 1}, got {rank}")
        return range(self.groups * rank // world_size, self.groups * (rank + 1) // world_size)
