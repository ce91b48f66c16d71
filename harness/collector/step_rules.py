"""How a rank collects its part of every step: the settings of a collector, checked when they are made. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from harness.collector.fates import OnFailure
from harness.collector.groups import GroupFilter
from harness.collector.sampling_scale import OffScale
from harness.collector.step_budget import StepBudget
from harness.collector.step_plan import Order
from harness.errors import StepError


class Partial(StrEnum):
    """What becomes of over-sampled groups, which still run when the step is complete."""

    DROP = "drop"
    """They are ended, and nothing of them is trained."""
    RESUME = "resume"
    """They are ended, their sessions are kept, and the next step begins by going on with them: their first tokens are a
    version older then."""


@dataclass(frozen=True, slots=True)
class StepRules:
    """The settings of a collector. Raises `StepError` that names the one that makes no sense."""

    budget: StepBudget
    rank: int = 0
    world_size: int = 1
    concurrency: int = 32
    """Rollouts that run at once, scoring included; or the size of a micro-batch."""
    over_sampling: int = 0
    """Groups that are begun beyond those of the rank's slice; the first ones that are whole and kept make the step."""
    partial: Partial = Partial.DROP
    group_filter: GroupFilter | None = None
    """Asked of every whole group; None keeps all."""
    most_dropped: int = 32
    """Groups that the filter may drop in a step; each is made up for by another one."""
    attempts: int = 3
    """For each place of a group; then the step fails."""
    on_failure: OnFailure = OnFailure.REPLACE
    order: Order = Order.INDEX
    deadline_s: float = 1800.0
    """For a rollout, scoring included; one that still runs then is ended and replaced."""
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
