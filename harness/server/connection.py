"""The client at the other end of a request: whether it is still there, and what it says about retrying.

A model call can take minutes. Whoever waits on behalf of a client asks here, or is called the moment it leaves.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from starlette.types import Receive

from harness.errors import ClientLeft

_LONGEST_COUNT = 9  # digits


class ClientConnection:
    """One request's client.

    Args:
        receive: ASGI messages of the request, from behind its body.
        headers: Of the request, with lower-case names.
    """

    def __init__(self, receive: Receive, headers: Mapping[str, str]) -> None:
        self._receive = receive
        self._callbacks: list[Callable[[], None]] = []
        self.has_left = False
        self.idempotency_key = headers.get("idempotency-key", "")
        self.says_retry = bool(self.idempotency_key) or _retry_count(headers) > 0
        """The client says that it has asked before."""

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Notice inside the block when the client leaves."""
        watcher = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.wait([watcher])

    @contextmanager
    def on_leave(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` when the client leaves inside the block; at once when it has left already."""
        if self.has_left:
            callback()
        self._callbacks.append(callback)
        try:
            yield
        finally:
            self._callbacks.remove(callback)

    def require_there(self) -> None:
        """Raises `ClientLeft` when nobody waits any more."""
        if self.has_left:
            raise ClientLeft("the client left before its turn began")

    async def is_still_there(self) -> bool:
        """Whether the client is there, counting a disconnect that has arrived and was not looked at yet."""
        await asyncio.sleep(0)
        return not self.has_left

    @asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Waiting on behalf of the client; raises `ClientLeft` inside the block when it leaves."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as deadline:
                with self.on_leave(lambda: deadline.reschedule(loop.time())):
                    yield
        except TimeoutError:
            if not deadline.expired():
                raise
            raise ClientLeft("the client left while its request waited") from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        for callback in list(self._callbacks):
            callback()


def _retry_count(headers: Mapping[str, str]) -> int:
    """`x-stainless-retry-count` of the SDKs of OpenAI and Anthropic; 0 when there is none that is a number."""
    count = headers.get("x-stainless-retry-count", "")
    return int(count) if count.isdecimal() and len(count) <= _LONGEST_COUNT else 0
