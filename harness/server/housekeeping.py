"""What a server gives back by itself: sessions that nobody uses any more, and the rows of closed ones.

Both are off unless the settings say how long to keep them. A look costs what there is to give back, not what there is;
rows go a few sessions at a time, so that turns which wait for the disk wait for no more than that. A store that fails
is asked again at the next look.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from harness.errors import StoreError
from harness.server.registry import SessionRegistry
from harness.store.base import SessionStore

CLOSED_SESSIONS_FORGOTTEN = "closed_sessions_forgotten"

_IDLE_LOOK_S = 1.0
_SESSIONS_AT_ONCE = 16

log = structlog.get_logger()


async def close_idle_sessions(sessions: SessionRegistry) -> None:
    """Close the sessions whose time to live is over, for ever."""
    await _again_and_again(sessions.expire, _IDLE_LOOK_S)


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
