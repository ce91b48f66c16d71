"""An ASGI application on its own socket in the running loop."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import TypeVar

import uvicorn
from starlette.types import ASGIApp

from harness.errors import CannotListen
from harness.machine.http_bounds import ServerConnections
from harness.machine.http_protocol import ResetAwareProtocol

_START_S = 30.0
_KEEP_ALIVE_S = 600  # agents think for minutes between two turns and reuse their connection
_SHUTDOWN_S = 5
_DATE_S = 1.0
_POLL_S = 0.005  # uvicorn offers nothing to wait for, neither at its start nor at its end


class EmbeddedServer(uvicorn.Server):
    """uvicorn without signal handlers, which belong to the surrounding program."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ends = asyncio.Event()

    def end(self) -> None:
        """Stop listening, and end after the requests in progress."""
        self.should_exit = True
        self._ends.set()

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]  # declared as a generator upstream
        return nullcontext()

    async def main_loop(self) -> None:
        """Update the date header every second, until the end."""
        # uvicorn polls ten times a second for its end; this wakes at once.
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self._ends.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, give connections their grace period, cancel the rest."""
        state, loop = self.server_state, asyncio.get_running_loop()
        for server in self.servers:
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        # asyncio loses a connection that is accepted but not begun when its listener closes. It begins a round later.
        for _ in range(2):
            await asyncio.sleep(0)
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while (state.connections or state.tasks) and not self.force_exit:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        if not self.force_exit:
            for task in state.tasks:
                task.cancel()
            await self.lifespan.shutdown()


class HangingUpServer(EmbeddedServer):
    """Server that can end like a killed process."""

    def __init__(self, app: ASGIApp, connections: ServerConnections) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_SHUTDOWN_S,
                http=ResetAwareProtocol,
                proxy_headers=False,  # any client may send them; an operator sets `ServerSettings.public_url`
                ws="none",  # else uvicorn enables whichever WebSocket library is installed
            )
        )
        self.server_state = self._connections = connections

    def hang_up(self) -> None:
        self.force_exit = True
        self.end()
        self._connections.reset_all()


_Server = TypeVar("_Server", bound=EmbeddedServer)


@asynccontextmanager
async def answering(server: _Server, listener: socket.socket) -> AsyncIterator[_Server]:
    """Serve at `listener` while the block runs."""
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(_START_S):
            while not server.started and not serving.done():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        yield server
    finally:
        server.end()
        await serving


def stop_at_signals(hang_up: Callable[[], None] = lambda: None) -> asyncio.Event:
    """Return an event that SIGINT or SIGTERM sets. A second signal calls `hang_up`."""
    stop = asyncio.Event()

    def end() -> None:
        if stop.is_set():
            hang_up()
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, end)
    return stop


def listening(host: str, port: int) -> socket.socket:
    """Bind a socket; port 0 picks a free one. Raises `CannotListen`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Explicit protocol: asyncio disables Nagle's algorithm (40 ms per answer) only on sockets that declare TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return listener
