"""The client at the other end of a request: whether it is still there, and what it says about retrying.

A model call can take minutes. Whoever waits on behalf of a client asks here, or is called, the moment nobody is to wait
for it any more: it has left, or the server dismisses it, because its session was ended or the server stops.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from starlette.types import Receive

from harness.errors import ClientLeft, HarnessError

HAND_OVER_S = 5.0
"""Long enough for an engine to notice an abort between two tokens; a client that comes back waits for it."""

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
        self.dismissal: HarnessError | None = None
        """Why nothing more is to be waited for on its behalf; None as long as it is served."""
        self.hand_over_s = HAND_OVER_S
        """What an engine gets, from the dismissal on, to hand over what it has sampled for the client."""
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

    def dismiss(self, reason: HarnessError, *, hand_over_s: float = HAND_OVER_S) -> None:
        """End every wait on behalf of the client; the first reason counts, and the shortest time to hand over."""
        if self.dismissal is None:
            self.dismissal, self.hand_over_s = reason, hand_over_s
        elif hand_over_s < self.hand_over_s:
            self.hand_over_s = hand_over_s
        else:
            return
        for callback in list(self._callbacks):
            callback()

    @contextmanager
    def on_dismissal(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` when the client is dismissed inside the block; at once when that has happened already."""
        if self.dismissal is not None:
            callback()
        self._callbacks.append(callback)
        try:
            yield
        finally:
            self._callbacks.remove(callback)

    def require_there(self) -> None:
        """Raises the reason for its dismissal: `ClientLeft` when nobody waits any more."""
        if self.dismissal is not None:
            raise self.dismissal

    async def is_still_there(self) -> bool:
        """Whether the client is there, counting a disconnect that has arrived and was not looked at yet."""
        await asyncio.sleep(0)
        return not self.has_left

    @asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Waiting on behalf of the client; raises the reason inside the block when it is dismissed."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as deadline:
                with self.on_dismissal(lambda: deadline.reschedule(loop.time())):
                    yield
        except TimeoutError:
            if not deadline.expired():
                raise
            self.require_there()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        self.dismiss(ClientLeft("the client left before its answer; the same request goes on with the turn"))


def _retry_count(headers: Mapping[str, str]) -> int:
    """`x-stainless-retry-count` of the SDKs of OpenAI and Anthropic; 0 when there is none that is a number."""
    count = headers.get("x-stainless-retry-count", "")
    return int(count) if count.isdecimal() and len(count) <= _LONGEST_COUNT else 0
