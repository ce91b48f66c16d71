"""Packs out of segments that come one by one, while the rest of a step is still being generated.

A stream holds back `lookahead` segments beyond those that fill a pack, so that it has a choice. Every pack takes the
oldest segment that waits, so none waits for ever, and of the others those that fill it best: up to `lookahead` of the
segments whose turn it is may give way to ones from behind. With no look-ahead packs are filled in order (next fit).

Which segments lie in which pack depends on their lengths and their order alone: no clock has a say.
"""

from collections.abc import Iterator

from harness.errors import SegmentError
from harness.samples.packing import fill_room
from harness.samples.packs import Pack
from harness.samples.segments import Segment


class PackStream:
    """Segments in, packs out. Between two calls fewer wait than fit into one pack in order and `lookahead` more.

    `position_rows` is that of `Pack.of`. Raises `SegmentError` when `packing_length` is below 1 or `lookahead` below 0.
    """

    def __init__(self, packing_length: int, lookahead: int = 64, position_rows: int = 1) -> None:
        if packing_length < 1 or lookahead < 0:
            raise SegmentError(
                f"packing_length is at least 1 and lookahead at least 0, these are {packing_length} and {lookahead}"
            )
        self.packing_length = packing_length
        self.lookahead = lookahead
        self._position_rows = position_rows
        self._waiting: list[tuple[int, Segment]] = []  # with their numbers, in the order in which they came
        self._count = 0
        self._due = 0  # of those that wait, so many fit into a pack in order
        self._due_tokens = 0

    @property
    def waiting(self) -> int:
        """How many segments are in no pack yet."""
        return len(self._waiting)

    def add(self, segment: Segment) -> Pack | None:
        """The next pack, when there is enough to choose from with `segment`; segments are numbered from 0.

        Raises `SegmentError` when it is longer than a pack, and changes nothing: `fit_segment` comes before.
        """
        if len(segment) > self.packing_length:
            raise SegmentError(
                f"segment {self._count} has {len(segment)} tokens; packing_length is {self.packing_length}"
            )
        self._waiting.append((self._count, segment))
        self._count += 1
        self._extend_due()
        behind = len(self._waiting) - self._due
        return self._take_pack() if behind >= max(self.lookahead, 1) else None

    def finish(self) -> Iterator[Pack]:
        """What is left, in packs; the stream is empty afterwards and may go on."""
        while self._waiting:
            yield self._take_pack()

    def _extend_due(self) -> None:
        for _, segment in self._waiting[self._due :]:
            if self._due_tokens + len(segment) > self.packing_length:
                return
            self._due += 1
            self._due_tokens += len(segment)

    def _take_pack(self) -> Pack:
        fixed = max(1, self._due - self.lookahead)
        room = self.packing_length - sum(len(segment) for _, segment in self._waiting[:fixed])
        lengths = [len(segment) for _, segment in self._waiting[fixed : self._due + self.lookahead]]
        places = [*range(fixed), *(fixed + place for place in fill_room(lengths, room))]
        numbers, segments = zip(*(self._waiting[place] for place in places), strict=True)
        for place in reversed(places):
            del self._waiting[place]
        self._due = self._due_tokens = 0
        self._extend_due()
        return Pack.of(segments, numbers, self._position_rows)
