"""When holds were on a gate: what held its turns up, for whoever looks at them later. Pure.

The holds of a gate say how it stands now. Here stands what was on it before, with its beginning and its end, up to so
many that have ended. Whoever changes the gate notes what is on it by then; renewing a hold changes nothing.
"""

from collections import deque
from collections.abc import Iterable

import msgspec

from harness.sessions.gate import Hold, HoldKind

MOST_HOLD_TIMES = 1_000
"""Holds that have ended and are remembered; each is a name and two times."""


class HoldTime(msgspec.Struct, frozen=True):
    """A hold that was on the gate, and when: Unix seconds by the clock of the server's machine."""

    holder: str
    kind: HoldKind
    engines: bool
    """It covered the engines too, as an update of the weights does."""
    began_at: float
    ended_at: float | None
    """None of one that is on it still, or that nobody took off before the server died."""


class HoldTimes:
    """The holds of one gate: those that are on it, and the last ones that were."""

    def __init__(self, most: int = MOST_HOLD_TIMES) -> None:
        self._ended: deque[HoldTime] = deque(maxlen=most)
        self._running: dict[str, HoldTime] = {}

    def restore(self, times: Iterable[HoldTime]) -> None:
        """Have what an earlier server left; the next note says which of them go on."""
        for each in times:
            if each.ended_at is None:
                self._running[each.holder] = each
            else:
                self._ended.append(each)

    def note(self, holds: Iterable[Hold], now: float) -> None:
        """The gate has these holds at `now`, and no others. One of another kind than before is another one."""
        current = {hold.holder: hold for hold in holds}
        for holder, running in list(self._running.items()):
            hold = current.get(holder)
            if hold is None or (hold.kind, hold.engines) != (running.kind, running.engines):
                self._ended.append(msgspec.structs.replace(self._running.pop(holder), ended_at=now))
        for holder, hold in current.items():
            if holder not in self._running:
                self._running[holder] = HoldTime(holder, hold.kind, hold.engines, now, None)

    def since(self, begin: float) -> list[HoldTime]:
        """Those that were on the gate at `begin` or later, in the order in which they began."""
        ended = [each for each in self._ended if each.ended_at is not None and each.ended_at >= begin]
        return sorted([*ended, *self._running.values()], key=lambda each: each.began_at)
