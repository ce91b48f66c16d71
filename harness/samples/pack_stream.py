"""Pack stream: builds packs while the step is being generated, by lengths and order of segments alone."""

from collections.abc import Iterator

from harness.errors import SegmentError
from harness.samples.packing import fill_room
from harness.samples.packs import Pack
from harness.samples.segments import Segment


class PackStream:
    """Segments in, packs out. Between calls, fewer wait than fit into one pack in order plus `lookahead`.

    Raises `SegmentError` when `packing_length` is below 1 or `lookahead` below 0.
    """

    def __init__(self, packing_length: int, lookahead: int = 64, position_rows: int = 1) -> None:
        if packing_length < 1 or lookahead < 0:
            raise SegmentError(f"expected packing_length >= 1 and lookahead >= 0, got {packing_length} and {lookahead}")
        self.packing_length = packing_length
        self.lookahead = lookahead
        self._position_rows = position_rows
        self._waiting: list[tuple[int, Segment]] = []  # with their numbers, in order of arrival
        self._count = 0
        self._due = 0  # waiting segments that fit into one pack in order
        self._due_tokens = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, segment: Segment) -> Pack | None:
        """Add a segment; return the next pack, if any. Raises `SegmentError`, with no change, if it exceeds a pack."""
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
        """Yield the remaining packs. The stream can be reused."""
        while self._waiting:
            yield self._take_pack()

    def _extend_due(self) -> None:
        for _, segment in self._waiting[self._due :]:
            if self._due_tokens + len(segment) > self.packing_length:
                return
            self._due += 1
            self._due_tokens += len(segment)

    def _take_pack(self) -> Pack:
        # Take the oldest segment, so none waits forever, then those that fill the pack best: up to `lookahead` segments
        # that are due may yield to later ones. Without lookahead packs fill in order (next fit).
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
