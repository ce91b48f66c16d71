"""An ASGI application on a socket of its own, in the running loop, for the time of a block."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import uvicorn
from starlette.types import ASGIApp

from harness.errors import HarnessError

LOOPBACK = "127.0.0.1"

_START_S = 30.0
_SHUTDOWN_S = 2


class _EmbeddedServer(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to the program around it."""

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]  # declared as a generator upstream
        return nullcontext()


@asynccontextmanager
async def serve_in_process(app: ASGIApp, *, host: str = LOOPBACK, port: int = 0) -> AsyncIterator[str]:
    """The base address of `app` while it answers; port 0 takes a free one. Raises `HarnessError` for a taken port."""
    with _bound(host, port) as listener:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=_SHUTDOWN_S
        )
        server = _EmbeddedServer(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await _started(server, serving)
            yield f"http://{host}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


async def _started(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    async with asyncio.timeout(_START_S):
        while not server.started and not serving.done():  # noqa: ASYNC110  # uvicorn offers nothing to wait for
            await asyncio.sleep(0.005)


def _bound(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise HarnessError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
