"""A streamed answer: what leaves while its turn is served, and what only afterwards.

An agent acts on tool calls and on the end of an answer, so these leave when the turn is durable (I2, I9). Reasoning and
content are for a reader: in a live session they leave as they are sampled, the first at once, and from then on gathered
for a moment, because each part costs as much as many tokens.
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
_GATHER_S = 0.02  # from one part to the next, at least


@dataclass(frozen=True, slots=True)
class StreamedTurn(Generic[_T]):
    """The turn of a streamed answer, as far as the answer asks."""

    stream: AnswerStream
    """Writes what is sent before the turn is served."""
    live_text: LiveText
    """Text of the turn that may be sent then; silent for a turn that is sent when it is recorded."""
    serve: Callable[[], Coroutine[Any, Any, _T]]
    """Serves the turn; raises `HarnessError`."""
    content: Callable[[_T], Coroutine[Any, Any, bytes]]
    """The rest, once the turn is served; raises `HarnessError`."""
    failure: Callable[[HarnessError], bytes]
    """Everything that is sent of an error, once the answer has begun."""
    delivery: Callable[[_T], Delivery]
    """Is told when a served turn has been handed over to a client that is still there."""


class StreamedAnswer(Response, Generic[_T]):
    """The response that serves a turn while its client listens, as server-sent events.

    An error that comes before anything was sent has its own status, as in an answer that is not streamed. A client that
    has waited for a while gets an event that says no more than that, and one more every so often while the gate holds
    its turn or the engine samples, so that nobody times out; an error is then an event in the form of the dialect, and
    ends the answer: what has been said before it is no answer without an end.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self, turn: StreamedTurn[_T], client: ClientConnection, place: ExitStack, *, comment_every_s: float
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS_OF_STREAMS)
        self._turn = turn
        self._client = client
        self._place = place
        self._comment_every_s = comment_every_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the turn. Raises its error when that comes before anything was sent."""
        del scope, receive
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
            except HarnessError as error:  # a bug goes its way: an answer without an end is never read as whole
                await send({"type": "http.response.body", "body": self._turn.failure(error)})
                return
            delivery = self._turn.delivery(answer)
            await send({"type": "http.response.body", "body": content})
            if not self._client.has_left:
                await delivery.hand_over()

    async def _parts_before_end(self, serving: asyncio.Task[_T]) -> AsyncGenerator[bytes]:
        """What is sent until the turn has an outcome: its text as far as it goes out live, and keep-alives."""
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
    """Wakes the one who listens: at once, or at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_rung = asyncio.Event()
        self._alarm: asyncio.Handle | None = None
        self._rings_at = inf  # kept here: uvloop's handle of a time that has just passed does not say it

    async def heard(self) -> None:
        """Return when it has rung since the last time."""
        await self._has_rung.wait()
        self._has_rung.clear()

    def ring(self) -> None:
        """Ring now; what it was to ring by has to be said again."""
        self.stop()
        self._has_rung.set()

    def ring_by(self, when: float) -> None:
        """Ring at that loop time, or before it; now if it has passed."""
        if when <= self._loop.time():
            self._has_rung.set()
        elif when < self._rings_at:
            self.stop()
            self._rings_at, self._alarm = when, self._loop.call_at(when, self.ring)

    def stop(self) -> None:
        """Do not ring any more by itself."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._rings_at, self._alarm = inf, None


@asynccontextmanager
async def _run(coroutine: Coroutine[Any, Any, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    """`coroutine` as a task that has ended by the end of the block."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
