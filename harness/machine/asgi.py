"""An ASGI application on a socket of its own, in the running loop, for the time of a block.

The caller's configuration of uvicorn says what is served and how connections are treated.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import TypeVar

import uvicorn

from harness.errors import CannotListen

_START_S = 30.0


class EmbeddedServer(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to the program around it."""

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]  # declared as a generator upstream
        """Leave signals alone."""
        return nullcontext()


_Server = TypeVar("_Server", bound=EmbeddedServer)


@asynccontextmanager
async def answering(server: _Server, listener: socket.socket) -> AsyncIterator[_Server]:
    """`server` while it answers at `listener`; it ends with the block, what it is answering included."""
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(_START_S):
            while not server.started and not serving.done():  # noqa: ASYNC110  # uvicorn offers nothing to wait for
                await asyncio.sleep(0.005)
        yield server
    finally:
        server.should_exit = True
        await serving


def listening(host: str, port: int) -> socket.socket:
    """A socket bound to that address; port 0 takes a free one. Raises `CannotListen`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named: asyncio switches Nagle's algorithm off (40 ms for an answer) only where a socket says that it is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return listener
