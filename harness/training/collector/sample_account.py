"""Accounts of samples handed over to a step. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from harness.samples.proximal import Staleness
from harness.training.collector.groups import Advantage
from harness.training.collector.rollout_index import RolloutIndex


class StepDropReason(StrEnum):
    """Reason why delivered tokens are not trained; encoders add more."""

    FILTERED = "filtered"
    OVER_SAMPLED = "over_sampled"
    """Group not needed."""
    STALE = "stale"
    """Older than `max_staleness` allows."""
    TOO_LONG = "too_long"
    """Does not fit into a pack."""
    FAILED_ROLLOUT = "failed_rollout"
    """Rollout replaced, or counted untrained."""
    CUT_BY_ENCODER = "cut_by_encoder"
    INTERRUPTED = "interrupted"
    """Session in no step."""


@dataclass(frozen=True, slots=True)
class SegmentedSample:
    """Account of a sample. Tokens shared with an earlier sample count there."""

    rollout: RolloutIndex
    sample: int
    advantage: Advantage
    tokens: int
    """Prompt and appended included."""
    trained: int
    """Sampled, loss mask 1."""
    masked: int
    """Sampled, loss mask 0, not stale."""
    appended: int = 0
    """Trained, not sampled."""
    reason: str = ""
    """Why it has no segment."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Sampled, but not in the segment or stale."""
    staleness: Staleness | None = None
    dropped_turns: int = 0
    """By the merge rule (I3)."""
    repeat_terminated: int = 0

    @property
    def sampled(self) -> int:
        return self.trained + self.masked + sum(self.dropped.values())
