"""Step rules: validated settings of a collector. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from harness.errors import StepError
from harness.training.collector.fates import OnFailure
from harness.training.collector.groups import GroupFilter
from harness.training.collector.sampling_scale import OffScale
from harness.training.collector.step_budget import StepBudget
from harness.training.collector.step_plan import Order


class Partial(StrEnum):
    """Policy for over-sampled groups at completion."""

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
            raise StepError('partial="resume" goes on with over-sampled groups, and over_sampling is 0; set that too')
