"""A streamed answer: the parts sent while its turn is served, and those sent afterwards.

An agent acts on tool calls and on the end of an answer, so these are sent once the turn is durable (I2, I9). A live
session sends reasoning and content as they are sampled. Parts after the first are batched, because each costs as much
as many tokens.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from harness.dialects.dialect import AnswerStream
from harness.dialects.sse import MEDIA_TYPE
from harness.errors import HarnessError
from harness.machine.http_protocol import Delivery
from harness.server.http.connection import ClientConnection
from harness.tokens.outputs.live_text import LiveText

_T = TypeVar("_T")

_HEADERS_OF_STREAMS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_GATHER_S = 0.02  # shortest time between two parts


@dataclass(frozen=True, slots=True)
class StreamedTurn(Generic[_T]):
    stream: AnswerStream
    """Encodes the parts sent before the turn is served."""
    live_text: LiveText
    """Text to send before that; silent unless the session is live."""
    serve: Callable[[], Coroutine[Any, Any, _T]]
    """Serves the turn; raises `HarnessError`."""
    content: Callable[[_T], Coroutine[Any, Any, bytes]]
    """Returns the rest of the answer; raises `HarnessError`."""
    failure: Callable[[HarnessError], bytes]
    """Returns the events for an error after the answer has begun."""
    delivery: Callable[[_T], Delivery]
    """Returns the callback for a complete hand-over."""


class StreamedAnswer(Response, Generic[_T]):
    """Response that serves a turn while its client listens, part by part.

    An error before the first event has its own status code. A later one is an event in the dialect's form and ends the
    stream; the earlier parts are then no answer. Keep-alive events prevent client timeouts.
    """

    def __init__(
        self,
        turn: StreamedTurn[_T],
        client: ClientConnection,
        place: ExitStack,
        *,
        media_type: str = MEDIA_TYPE,
        comment_every_s: float,
    ) -> None:
        self.media_type = media_type
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS_OF_STREAMS)
        self._turn = turn
        self._client = client
        self._place = place
        self._comment_every_s = comment_every_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the turn. Raises its error if nothing was sent yet."""
        with self._place, self._client.watch():
            await self._serve_and_send(send)

    async def _serve_and_send(self, send: Send) -> None:
        begin = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with _run(self._turn.serve()) as serving:
            has_begun, content = False, None
            async with aclosing(self._parts_before_end(serving)) as parts:
                async for part in parts:
                    if not has_begun:
                        await send(begin)
                    has_begun = True
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            if not has_begun:
                content = await self._turn.content(await serving)
                await send(begin)
            try:
                answer = await serving
                if content is None:
                    content = await self._turn.content(answer)
            except HarnessError as error:  # a bug propagates: clients reject an answer without an end
                await send({"type": "http.response.body", "body": self._turn.failure(error)})
                return
            delivery = self._turn.delivery(answer)
            await send({"type": "http.response.body", "body": content})
            if not self._client.has_left:
                await delivery.hand_over()

    async def _parts_before_end(self, serving: asyncio.Task[_T]) -> AsyncGenerator[bytes]:
        loop, turn, bell = asyncio.get_running_loop(), self._turn, _Bell()
        gathered_at, due = loop.time(), loop.time() + self._comment_every_s
        serving.add_done_callback(lambda _: bell.ring())
        turn.live_text.tell = lambda: bell.ring_by(gathered_at)
        try:
            while True:
                bell.ring_by(due)
                await bell.heard()
                if serving.done():
                    return
                delta = turn.live_text.take()
                if any(delta):
                    yield turn.stream.say(delta)
                elif loop.time() >= due:
                    yield turn.stream.keep_alive()
                else:
                    continue
                gathered_at, due = loop.time() + _GATHER_S, loop.time() + self._comment_every_s
        finally:
            bell.stop()


class _Bell:
    """Wakes its listener at a given time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_rung = asyncio.Event()
        self._alarm: asyncio.Handle | None = None
        self._rings_at = inf  # kept here, because uvloop's handle of a past time does not report it

    async def heard(self) -> None:
        await self._has_rung.wait()
        self._has_rung.clear()

    def ring(self) -> None:
        """Ring now, and forget `ring_by` times."""
        self.stop()
        self._has_rung.set()

    def ring_by(self, when: float) -> None:
        """Ring at that loop time at the latest."""
        if when <= self._loop.time():
            self._has_rung.set()
        elif when < self._rings_at:
            self.stop()
            self._rings_at, self._alarm = when, self._loop.call_at(when, self.ring)

    def stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._rings_at, self._alarm = inf, None


@asynccontextmanager
async def _run(coroutine: Coroutine[Any, Any, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
