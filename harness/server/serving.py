"""Running a session server: inside another program, or as a program of its own."""

import asyncio
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass

import structlog
import uvicorn
from starlette.types import ASGIApp

from harness.engines.base import TokenProvider
from harness.engines.pool import EnginePool
from harness.engines.repeat_guard import SignalCheck, object_key_ids, require_guard, wanted_guard
from harness.errors import HarnessError
from harness.server.app import SessionServer
from harness.server.gatekeeper import Gatekeeper
from harness.server.http_protocol import ResetAwareProtocol
from harness.server.settings import ServerSettings
from harness.server.turns import TurnService
from harness.store.base import SessionStore
from harness.telemetry.metrics import ServerMetrics
from harness.tokens.chat_tokenizer import ChatTokenizer

log = structlog.get_logger()

_KEEP_ALIVE_S = 600  # agents think for minutes between two turns and reuse their connection
_SHUTDOWN_S = 5
_START_S = 30.0
_RESET = struct.pack("ii", 1, 0)  # close with a reset, whatever is unsent or unread

Around = Callable[[ASGIApp], ASGIApp]
"""Puts the application of a session server into a larger one."""


def _alone(app: ASGIApp) -> ASGIApp:
    return app


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers."""

    url: str
    """`http://host:port`, without a trailing slash."""
    server: SessionServer
    restored: int
    """Sessions taken up from the store."""
    hang_up: Callable[[], None]
    """Refuse and reset every connection from now on, as when the process is killed; the block then ends quickly."""


@asynccontextmanager
async def serve_in_process(
    engine: TokenProvider,
    chat_tokenizer: ChatTokenizer,
    store: SessionStore,
    settings: ServerSettings | None = None,
    *,
    around: Around = _alone,
) -> AsyncIterator[RunningServer]:
    """A session server in the running loop, for the time of the block; `around` makes what answers at its address.

    Enters `engine` and `store`. Raises `HarnessError` when the address cannot be bound, or when the engine does not run
    the repeat guard that is wanted.
    """
    settings = settings or ServerSettings()
    settings.check()
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(_bind(settings))
        await stack.enter_async_context(store)
        await stack.enter_async_context(engine)
        guard = wanted_guard(settings.repeat_guard, os.environ)
        if guard is not None:
            require_guard(engine.capabilities, guard)
        gatekeeper = Gatekeeper(pause_timeout_s=settings.pause_timeout_s)
        check = None if guard is None else SignalCheck(guard, object_key_ids(chat_tokenizer.tokenizer))
        turns = TurnService(engine, chat_tokenizer, store, ServerMetrics(), gatekeeper, settings, check)
        server = SessionServer(turns)
        restored = await server.sessions.restore()
        if isinstance(engine, EnginePool):
            engine.observe(turns.metrics)
        embedded = await stack.enter_async_context(_uvicorn(around(server.app()), listener))
        host, port = listener.getsockname()[:2]
        _log_family(chat_tokenizer)
        log.info("server_started", url=f"http://{host}:{port}", engine=engine.capabilities.engine, restored=restored)
        yield RunningServer(f"http://{host}:{port}", server, restored, embedded.hang_up)


async def serve_forever(
    engine: TokenProvider,
    chat_tokenizer: ChatTokenizer,
    store: SessionStore,
    settings: ServerSettings,
    started: Callable[[RunningServer], None],
    *,
    around: Around = _alone,
) -> None:
    """A session server until SIGINT or SIGTERM; calls `started` as soon as it answers."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)
    async with serve_in_process(engine, chat_tokenizer, store, settings, around=around) as running:
        started(running)
        await stop.wait()


def _log_family(chat_tokenizer: ChatTokenizer) -> None:
    """Say how conversations become ids: which turns go on exactly, and where the template would rewrite them."""
    family = chat_tokenizer.describe()
    log.info(
        "model_family",
        renderer=family.renderer,
        call_syntax=family.call_syntax,
        delimiters={transition: str(source) for transition, source in family.delimiters.items()},
        notes=list(family.notes),
    )
    if family.divergence is not None:
        log.warning("template_not_append_only", **asdict(family.divergence))


class _EmbeddedServer(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to the program around it."""

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]  # declared as a generator upstream
        return nullcontext()

    def hang_up(self) -> None:
        """Stop listening and reset every connection; what is being answered goes on, for nobody."""
        self.should_exit = self.force_exit = True
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            transport = connection.transport
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            transport.abort()


@asynccontextmanager
async def _uvicorn(app: ASGIApp, listener: socket.socket) -> AsyncIterator[_EmbeddedServer]:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        http=ResetAwareProtocol,
    )
    embedded = _EmbeddedServer(config)
    serving = asyncio.create_task(embedded.serve(sockets=[listener]))
    try:
        await _started(embedded, serving)
        yield embedded
    finally:
        embedded.should_exit = True
        await serving


async def _started(embedded: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    async with asyncio.timeout(_START_S):
        while not embedded.started and not serving.done():  # noqa: ASYNC110  # uvicorn offers nothing to wait for
            await asyncio.sleep(0.005)


def _bind(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise HarnessError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
    return listener
