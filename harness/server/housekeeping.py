"""A server gives back by itself: memory of idle sessions, sessions that nobody uses, and the rows of closed ones.

`LastUses` knows when each session was last used. One with a call under way is in use, wherever the call is: waiting at
the gate, being encoded, or in flight.

All are off unless the settings say how long to keep them. A look costs what there is to give back, not what there is;
rows go a few sessions at a time, so that turns which wait for the disk wait for no more than that. A store that fails
is asked again at the next look.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import islice

from harness.errors import StoreError
from harness.machine.clock import Clock
from harness.machine.log import get_logger
from harness.store.base import SessionStore

CLOSED_SESSIONS_FORGOTTEN = "closed_sessions_forgotten"

_IDLE_LOOK_S = 1.0
_SESSIONS_AT_ONCE = 16

log = get_logger(__name__)


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
    def kept(self, session_id: str) -> Iterator[None]:
        """The session is in use in the block, by somebody whose use does not count."""
        self._calls[session_id] += 1
        try:
            yield
        finally:
            self._calls[session_id] -= 1
            if not self._calls[session_id]:
                del self._calls[session_id]

    def is_in_use(self, session_id: str) -> bool:
        """A call of it is under way."""
        return session_id in self._calls

    def last_use(self, session_id: str) -> float | None:
        """When it was used last; None of one that is not known."""
        return self._times.get(session_id)

    def find_unused(self, seconds: float, most: int, is_busy: Callable[[str], bool]) -> list[str]:
        """Some of the sessions that have not been used for so long; one in use, or busy, begins anew."""
        now, over = self._clock(), []
        for session_id in list(islice(self._times, most)):
            if now - self._times[session_id] < seconds:
                break
            if session_id in self._calls or is_busy(session_id):
                self.use(session_id)
            else:
                over.append(session_id)
        return over


async def page_out_idle_sessions(page_out: Callable[[], Awaitable[int]]) -> None:
    """Page out what is idle, for ever; `page_out` is `SessionRegistry.page_out_idle`."""
    await _again_and_again(page_out, _IDLE_LOOK_S)


async def close_idle_sessions(expire: Callable[[], Awaitable[int]]) -> None:
    """Close the sessions whose time to live is over, for ever; `expire` is `SessionRegistry.expire`."""
    await _again_and_again(expire, _IDLE_LOOK_S)


async def forget_closed_sessions(store: SessionStore, keep_s: float, *, every_s: float = 60.0) -> None:
    """Delete what the store has of sessions that have been closed for `keep_s`, for ever."""

    async def forget() -> None:
        forgotten = 0
        while count := await store.forget_closed(keep_s, _SESSIONS_AT_ONCE):
            forgotten += count
        if forgotten:
            log.info(CLOSED_SESSIONS_FORGOTTEN, sessions=forgotten, keep_s=keep_s)

    await _again_and_again(forget, every_s)


async def _again_and_again(look: Callable[[], Awaitable[object]], every_s: float) -> None:
    while True:
        try:
            await look()
        except StoreError as error:
            log.warning("housekeeping_failed", error=error.message)
        await asyncio.sleep(every_s)
