"""Where the tokens of a sample went when its rollout was handed over. A value without I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.collector.rollout_index import RolloutIndex
from harness.samples.proximal import Staleness


@dataclass(frozen=True, slots=True)
class SegmentedSample:
    """A sample at the moment of its hand-over, and where its tokens went."""

    rollout: RolloutIndex
    sample: int
    """Its place among the samples of its rollout."""
    advantage: float
    tokens: int
    """Of its segment, prompt and what an encoder appended included; 0 when it has none."""
    trained: int
    """Sampled tokens of the segment with loss mask 1."""
    masked: int
    """Sampled tokens of the segment with loss mask 0. Here and below, tokens of a turn that an earlier sample of the
    rollout has as well are left out: they are counted there."""
    appended: int = 0
    """Tokens to train that nobody sampled."""
    reason: str = ""
    """Why it has no segment: `stale`, `too_long`, or an encoder's word; empty when it has one."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Sampled tokens that the segment does not have, by reason: those above, and `cut_by_encoder`."""
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
