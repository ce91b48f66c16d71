"""Background cleanup: evict idle sessions, close unused ones, delete closed rows, a few at a time."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import islice

from harness.errors import StoreError
from harness.machine.clock import Clock
from harness.machine.log import get_logger
from harness.server.store.base import SessionStore

CLOSED_SESSIONS_FORGOTTEN = "closed_sessions_forgotten"

_IDLE_LOOK_S = 1.0
_SESSIONS_AT_ONCE = 16

log = get_logger(__name__)


class LastUses:
    """Last use of sessions, by id. A session with a call in progress is in use, even at the gate."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: dict[str, float] = {}
        """Least recently used first."""
        self._calls: Counter[str] = Counter()

    def begin(self, session_id: str) -> None:
        """Start to track a session, as used now."""
        self._times[session_id] = self._clock()

    def end(self, session_id: str) -> None:
        self._times.pop(session_id, None)

    def use(self, session_id: str) -> None:
        """Note a use of a tracked session."""
        if self._times.pop(session_id, None) is not None:
            self.begin(session_id)

    @contextmanager
    def kept(self, session_id: str) -> Iterator[None]:
        """Keep the session in use within the block, without counting as a use."""
        self._calls[session_id] += 1
        try:
            yield
        finally:
            self._calls[session_id] -= 1
            if not self._calls[session_id]:
                del self._calls[session_id]

    def is_in_use(self, session_id: str) -> bool:
        """Return True if a call is in progress."""
        return session_id in self._calls

    def last_use(self, session_id: str) -> float | None:
        """Return the time of the last use, or None if unknown."""
        return self._times.get(session_id)

    def find_unused(self, seconds: float, most: int, is_busy: Callable[[str], bool]) -> list[str]:
        """Return some sessions unused for `seconds`. Busy ones count as used now."""
        now, over = self._clock(), []
        for session_id in list(islice(self._times, most)):
            if now - self._times[session_id] < seconds:
                break
            if session_id in self._calls or is_busy(session_id):
                self.use(session_id)
            else:
                over.append(session_id)
        return over


async def repeat(chore: Callable[[], Awaitable[object]], every_s: float = _IDLE_LOOK_S) -> None:
    """Do `chore` forever. A `StoreError` costs one turn of it."""
    while True:
        try:
            await chore()
        except StoreError as error:
            log.warning("housekeeping_failed", error=error.message)
        await asyncio.sleep(every_s)


async def forget_closed_sessions(store: SessionStore, keep_s: float, *, every_s: float = 60.0) -> None:
    """Delete sessions closed for `keep_s` from the store, forever."""

    async def forget() -> None:
        forgotten = 0
        while count := await store.forget_closed(keep_s, _SESSIONS_AT_ONCE):
            forgotten += count
        if forgotten:
            log.info(CLOSED_SESSIONS_FORGOTTEN, sessions=forgotten, keep_s=keep_s)

    await repeat(forget, every_s)
