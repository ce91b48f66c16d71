"""A turn answered as server-sent events.

An error that comes soon has its own status, as in an answer that is not streamed. A client that has waited for a while
gets a comment, and one more every so often while the gate holds its turn or the engine samples, so that nobody times
out; an error is then an event in the form of the dialect, and ends the answer. Of a turn itself nothing is sent before
it is durable (I9): deltas are cut from the recorded answer, not passed on while the engine samples.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from harness.dialects.sse import MEDIA_TYPE, comment
from harness.errors import HarnessError
from harness.server.connection import ClientConnection
from harness.server.http_protocol import Delivery

_T = TypeVar("_T")

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_WAITING = comment("waiting")


@dataclass(frozen=True, slots=True)
class StreamedTurn(Generic[_T]):
    """What a streamed answer asks of whoever serves turns."""

    serve: Callable[[], Coroutine[Any, Any, _T]]
    """Serves the turn; raises `HarnessError`."""
    content: Callable[[_T], bytes]
    """Everything that is sent of a served turn."""
    failure: Callable[[HarnessError], bytes]
    """Everything that is sent of an error, once the answer has begun."""
    delivery: Callable[[_T], Delivery]
    """What is told when a served turn has been handed over to a client that is still there."""


class StreamedAnswer(Response, Generic[_T]):
    """The response that serves a turn while its client listens."""

    media_type = MEDIA_TYPE

    def __init__(self, turn: StreamedTurn[_T], client: ClientConnection, *, comment_every_s: float) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._turn = turn
        self._client = client
        self._comment_every_s = comment_every_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the turn. Raises its error when that comes before anything was sent."""
        del scope, receive
        async with self._client.watched(), _running(self._turn.serve()) as served:
            if await self._ends_soon(served):
                await served
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while not served.done():
                await send({"type": "http.response.body", "body": _WAITING, "more_body": True})
                await self._ends_soon(served)
            await self._finish(served, send)

    async def _ends_soon(self, served: asyncio.Task[_T]) -> bool:
        """Whether the turn has an outcome, now or before the next comment is due."""
        await asyncio.wait([served], timeout=self._comment_every_s)
        return served.done()

    async def _finish(self, served: asyncio.Task[_T], send: Send) -> None:
        try:
            turn = await served
        except HarnessError as error:
            await send({"type": "http.response.body", "body": self._turn.failure(error)})
            return
        delivery = self._turn.delivery(turn)
        await send({"type": "http.response.body", "body": self._turn.content(turn), "more_body": True})
        # Asked before the end: the web server reports every client as gone once its response is complete.
        is_delivered = await self._client.is_still_there()
        await send({"type": "http.response.body"})
        if is_delivered:
            await delivery.hand_over()


@asynccontextmanager
async def _running(coroutine: Coroutine[Any, Any, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    """`coroutine` as a task that has ended by the end of the block."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
