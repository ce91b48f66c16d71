"""History of a gate's holds, noted after each change. Pure."""

from collections import deque
from collections.abc import Iterable

import msgspec

from harness.sessions.gate import Hold, HoldKind

MOST_HOLD_TIMES = 1_000


class HoldTime(msgspec.Struct, frozen=True):
    holder: str
    kind: HoldKind
    engines: bool
    began_at: float
    ended_at: float | None
    """None while it lasts, or if the server died first."""


class HoldTimes:
    def __init__(self, most: int = MOST_HOLD_TIMES) -> None:
        self._ended: deque[HoldTime] = deque(maxlen=most)
        self._running: dict[str, HoldTime] = {}

    def restore(self, times: Iterable[HoldTime]) -> None:
        """Load an earlier server's history."""
        for each in times:
            # The next `note` ends those that are gone.
            if each.ended_at is None:
                self._running[each.holder] = each
            else:
                self._ended.append(each)

    def note(self, holds: Iterable[Hold], now: float) -> None:
        """Record the complete set of holds at `now`."""
        current = {hold.holder: hold for hold in holds}
        for holder, running in list(self._running.items()):
            hold = current.get(holder)
            # A changed kind is another hold.
            if hold is None or (hold.kind, hold.engines) != (running.kind, running.engines):
                self._ended.append(msgspec.structs.replace(self._running.pop(holder), ended_at=now))
        for holder, hold in current.items():
            if holder not in self._running:
                self._running[holder] = HoldTime(holder, hold.kind, hold.engines, now, None)

    def since(self, begin: float) -> list[HoldTime]:
        """Return the holds at or after `begin`, oldest first."""
        ended = [each for each in self._ended if each.ended_at is not None and each.ended_at >= begin]
        return sorted([*ended, *self._running.values()], key=lambda each: each.began_at)
