"""Step flow: one step on its way to the learner."""

import time
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum

from harness.samples.pack_stream import PackStream
from harness.samples.packs import Pack
from harness.training.collector.rollout_index import RolloutIndex
from harness.training.collector.sample_account import SegmentedSample
from harness.training.collector.segment_maker import MadeSegment
from harness.training.collector.step_result import PackFacts


class Normalizer(StrEnum):
    """Divisor of the summed loss of a step."""

    TOKENS = "tokens"
    """With loss mask 1."""
    SEQUENCES = "sequences"
    """Segments."""
    ROLLOUTS = "rollouts"
    """Counted ones included."""


class StepFlow:
    """Samples, packs and times of one step."""

    def __init__(self, stream: PackStream) -> None:
        self.stream = stream
        self.samples: list[SegmentedSample] = []
        self.packs: list[PackFacts] = []
        self.encoder_counts: Counter[str] = Counter()
        self.normalizers: Counter[Normalizer] = Counter()
        self.learned: list[tuple[float, float]] = []
        self.pack_waits_s = 0.0
        self._names: list[tuple[RolloutIndex, int]] = []  # of the segments in the stream, by number

    def add_next(self, making: Iterator[MadeSegment]) -> Pack | None:
        """Make the next segment. Return a pack if one is ready."""
        made = next(making)
        facts = made.facts
        self.samples.append(facts)
        self.encoder_counts.update(made.counts)
        if made.segment is None:
            return None
        self.normalizers[Normalizer.TOKENS] += facts.trained + facts.appended
        self.normalizers[Normalizer.SEQUENCES] += 1
        self._names.append((facts.rollout, facts.sample))
        return self.stream.add(made.segment)

    def note_learned(self, pack: Pack, digest: str, asked_at: float, began_at: float) -> None:
        """Record a pack that the learner has just finished."""
        self.pack_waits_s += began_at - asked_at
        self.learned.append((began_at, time.monotonic()))
        names = tuple(self._names[number] for number in pack.numbers)
        self.packs.append(PackFacts(digest, len(pack), int(pack.loss_mask.sum()), names))
