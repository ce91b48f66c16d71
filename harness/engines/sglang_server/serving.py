"""Serves an engine's application in the running loop, and works only while its client is connected.

A disconnect cancels its generation, as in SGLang.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeVar

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from harness.machine.asgi import EmbeddedServer, answering, listening

_T = TypeVar("_T")

LOOPBACK = "127.0.0.1"

_SHUTDOWN_S = 2


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work`. If the client leaves, cancel it and raise `ClientDisconnect`. The body must have been read."""

    async def await_departure() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(await_departure())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """Server-sent events until the client leaves; always closes the generator."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def serve_in_process(app: ASGIApp, *, host: str = LOOPBACK, port: int = 0) -> AsyncIterator[str]:
    """Serve `app` in the block and yield its base address; port 0 picks a free one. Raises `HarnessError` if taken."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=_SHUTDOWN_S
    )
    with listening(host, port) as listener:
        async with answering(EmbeddedServer(config), listener):
            yield f"http://{host}:{listener.getsockname()[1]}"
