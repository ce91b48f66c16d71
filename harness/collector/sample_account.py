"""Where the tokens of a sample went when its rollout was handed over, and the words for it. Values without I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from harness.collector.groups import Advantage
from harness.collector.rollout_index import RolloutIndex
from harness.samples.proximal import Staleness


class StepDropReason(StrEnum):
    """Why a step does not train tokens that its sessions delivered; encoders add words of their own."""

    FILTERED = "filtered"
    """Of a whole group that a filter dropped."""
    OVER_SAMPLED = "over_sampled"
    """Of a group that was begun beyond those that the step wanted, and ended with it."""
    STALE = "stale"
    """Sampled by a policy that is further behind the learner's than `max_staleness` allows; masked, or in a sample that
    was dropped for it."""
    TOO_LONG = "too_long"
    """Of a segment that no pack can hold: the whole of it, or what was cut off."""
    FAILED_ROLLOUT = "failed_rollout"
    """Of a rollout that another attempt replaced, or that counts and trains nothing."""
    CUT_BY_ENCODER = "cut_by_encoder"
    """Sampled tokens at the end of a sample that its encoder left out of the segment."""
    INTERRUPTED = "interrupted"
    """Of a session that no step stands for: its rollout ended with the process that ran it, or was cancelled."""


@dataclass(frozen=True, slots=True)
class SegmentedSample:
    """A sample at the moment of its hand-over, and where its tokens went."""

    rollout: RolloutIndex
    sample: int
    """Its place among the samples of its rollout."""
    advantage: Advantage
    tokens: int
    """Of its segment, prompt and what an encoder appended included; 0 when it has none."""
    trained: int
    """Sampled tokens of the segment with loss mask 1."""
    masked: int
    """Sampled tokens of the segment with loss mask 0, without those that are `stale`. Here and below, tokens of a turn
    that an earlier sample of the rollout has as well are left out: they are counted there."""
    appended: int = 0
    """Tokens to train that nobody sampled."""
    reason: str = ""
    """Why it has no segment: a `StepDropReason`, or an encoder's word; empty when it has one."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Sampled tokens that the segment does not have or, too old, does not train, by reason."""
    staleness: Staleness | None = None
    """Of its sampled tokens, counted from the live policy; None when it has none."""
    dropped_turns: int = 0
    """Turns behind its last one that the merge rule left out of it (I3)."""
    repeat_terminated: int = 0
    """1 when the repeat guard ended it."""

    @property
    def sampled(self) -> int:
        """Its own sampled tokens, whatever became of them."""
        return self.trained + self.masked + sum(self.dropped.values())
