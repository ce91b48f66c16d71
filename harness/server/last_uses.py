"""When each session was last used, so that those that nobody uses any more can be given back.

A session with a call under way is in use, wherever the call is: waiting at the gate, being encoded, or in flight.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from harness.machine.clock import Clock


class LastUses:
    """The last use of sessions by their id; a look at them costs what it finds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: dict[str, float] = {}
        """The longest unused first."""
        self._calls: Counter[str] = Counter()
        """Calls under way."""

    def begin(self, session_id: str) -> None:
        """Know a session from now on, as used just now."""
        self._times[session_id] = self._clock()

    def end(self, session_id: str) -> None:
        """Forget a session."""
        self._times.pop(session_id, None)

    def use(self, session_id: str) -> None:
        """Note that a session was used just now, if it is known."""
        if self._times.pop(session_id, None) is not None:
            self.begin(session_id)

    @contextmanager
    def in_use(self, session_id: str) -> Iterator[None]:
        """The session is in use in the block, and has just been used after it."""
        self._calls[session_id] += 1
        try:
            yield
        finally:
            self._calls[session_id] -= 1
            if not self._calls[session_id]:
                del self._calls[session_id]
            self.use(session_id)

    def unused_for(self, seconds: float, most: int) -> list[str]:
        """Some of the sessions that have not been used for so long; one that a call keeps in use begins anew."""
        now, over = self._clock(), []
        for session_id in list(islice(self._times, most)):
            if now - self._times[session_id] < seconds:
                break
            if session_id in self._calls:
                self.use(session_id)
            else:
                over.append(session_id)
        return over
