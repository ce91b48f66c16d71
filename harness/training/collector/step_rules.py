"""Step rules: validated settings of a collector, and what becomes of a rollout. Pure.

An engine or harness failure says nothing about the policy, so the rollout is replaced. An agent failure may be the
policy's doing: the trainer chooses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from harness.errors import StepError
from harness.samples.rollout import OutcomeKind
from harness.training.collector.groups import GroupFilter
from harness.training.collector.sampling_scale import OffScale
from harness.training.collector.step_outcome import Disposition


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Exact number of rollouts per step, over all ranks, in whole groups. Raises `StepError` for impossible ones."""

    rollouts_per_step: int
    group_size: int = 1

    def __post_init__(self) -> None:
        if self.rollouts_per_step < 1 or self.group_size < 1:
            raise StepError(f"expected rollouts_per_step and group_size of at least 1, got {self}")
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
            raise StepError(f"per_device_batch times world_size: expected at least 1, got {batch}")
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


class OnFailure(StrEnum):
    REPLACE = "replace"
    COUNT = "count"


class Order(StrEnum):
    """Order in which groups are handed over."""

    INDEX = "index"
    """By number, once all before are decided."""
    ARRIVAL = "arrival"
    """As they are kept."""


class Partial(StrEnum):
    DROP = "drop"
    RESUME = "resume"
    """Keep their sessions and continue next step, one version older."""


@dataclass(frozen=True, slots=True)
class StepRules:
    """Settings of a collector. Raises `StepError` naming an invalid one."""

    budget: StepBudget
    rank: int = 0
    world_size: int = 1
    concurrency: int = 32
    """Rollouts at once, scoring included."""
    over_sampling: int = 0
    """Extra groups to begin; the first whole ones make the step."""
    partial: Partial = Partial.DROP
    group_filter: GroupFilter | None = None
    most_dropped: int = 32
    """Groups that the filter may drop per step; each is replaced."""
    attempts: int = 3
    """Per place; then the step fails."""
    on_failure: OnFailure = OnFailure.REPLACE
    order: Order = Order.INDEX
    deadline_s: float = 1800.0
    """Per rollout, scoring included; then it is replaced."""
    off_scale: OffScale = OffScale.REFUSE

    def __post_init__(self) -> None:
        self.budget.slice_of(self.rank, self.world_size)
        for name, least in (("concurrency", 1), ("over_sampling", 0), ("most_dropped", 0), ("attempts", 1)):
            if getattr(self, name) < least:
                raise StepError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if not self.deadline_s > 0:
            raise StepError(f"deadline_s: expected a positive number of seconds, got {self.deadline_s}")
        if self.partial is Partial.RESUME and not self.over_sampling:
            raise StepError('partial="resume" continues with over-sampled groups, and over_sampling is 0; set that too')


DISPOSITIONS: Mapping[OutcomeKind, Disposition | None] = {
    OutcomeKind.FINISHED: Disposition.DELIVERED,
    OutcomeKind.LIMITED: Disposition.DELIVERED,
    OutcomeKind.NO_MODEL_CALL: None,
    OutcomeKind.CRASHED: None,
    OutcomeKind.GARBAGE: None,
    OutcomeKind.TIMED_OUT: None,
    OutcomeKind.DRAINED: Disposition.REPLACED,  # by a client or operator: rollouts that a step ends never come here
    OutcomeKind.NOT_STARTED: Disposition.REPLACED,
    OutcomeKind.ENGINE_FAILED: Disposition.REPLACED,
    OutcomeKind.SANDBOX_FAILED: Disposition.REPLACED,
    OutcomeKind.HARNESS_FAILED: Disposition.REPLACED,
}
"""None if `OnFailure` decides."""


def dispose(kind: OutcomeKind, on_failure: OnFailure, *, is_usable: bool = True) -> Disposition:
    """Return what becomes of a rollout. `is_usable`: it has a finite reward, and its encoder did not fail."""
    disposition = DISPOSITIONS[kind]
    if disposition is None:
        return Disposition.COUNTED if on_failure is OnFailure.COUNT else Disposition.REPLACED
    # A missing reward is never a zero.
    return Disposition.REPLACED if disposition is Disposition.DELIVERED and not is_usable else disposition
