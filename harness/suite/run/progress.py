"""How a run says what it is doing; drawing it is the caller's business."""

from typing import Protocol

from harness.suite.record.rollout_table import RolloutRecord
from harness.suite.scenarios.plan import PlannedRollout


class Progress(Protocol):
    """Called from the run's event loop; must return quickly and must not raise."""

    def say(self, text: str) -> None:
        """Something the user wants to know, in one line."""

    def planned(self, total: int, done: int) -> None:
        """The run has `total` rollouts, of which `done` are not run again."""

    def started(self, rollout: PlannedRollout) -> None:
        """A rollout has begun."""

    def ended(self, record: RolloutRecord) -> None:
        """A rollout has ended and its record is durable."""


class Silence:
    """A `Progress` that nobody watches."""

    def say(self, text: str) -> None:
        """Say nothing."""

    def planned(self, total: int, done: int) -> None:
        """Say nothing."""

    def started(self, rollout: PlannedRollout) -> None:
        """Say nothing."""

    def ended(self, record: RolloutRecord) -> None:
        """Say nothing."""
