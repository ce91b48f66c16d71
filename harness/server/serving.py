"""Running a session server inside another program, or as its own program."""

import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from starlette.types import ASGIApp

from harness.engines.base import ContinuesAtEntry, ProvesScripts, TokenProvider
from harness.engines.repeat_guard import SignalCheck, choose_guard, object_key_ids, require_guard
from harness.errors import ScenarioError
from harness.machine.asgi import HangingUpServer, answering, listening, stop_at_signals
from harness.machine.clock import Clock
from harness.machine.http_bounds import ConnectionBounds, ServerConnections
from harness.machine.log import get_logger
from harness.machine.this_process import descriptor_limit
from harness.server.app import SessionServer
from harness.server.gatekeeper import Gatekeeper
from harness.server.housekeeping import forget_closed_sessions, repeat
from harness.server.settings import ServerSettings
from harness.server.store.base import SessionStore
from harness.server.telemetry.metrics import ServerMetrics
from harness.server.telemetry.tracing.collector import traces_url
from harness.server.telemetry.tracing.tracer import SessionTracer
from harness.server.turns import TurnService
from harness.sessions.gate import Gate, HoldKind
from harness.tokens.chat_tokenizer import ChatTokenizer
from server_patch.background import running

log = get_logger(__name__)

_OWN_DESCRIPTORS = 128  # for the store, logs, and engine queries outside turns
SWITCH_S = 0.0005
"""Longest wait of a standalone server's event loop for the GIL. Python's default of 5 ms exceeds a turn."""

Around = Callable[[SessionServer], AbstractAsyncContextManager[ASGIApp]]
"""Embeds the application of a session server into a larger one."""


def alone(server: SessionServer) -> AbstractAsyncContextManager[ASGIApp]:
    """Return the plain application."""
    return nullcontext(server.app())


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    """`http://host:port`, without a trailing slash."""
    server: SessionServer
    restored: int
    """Sessions restored from the store."""
    hang_up: Callable[[], None]
    """Resets every connection from now on, like a killed process. The block then ends quickly."""


@asynccontextmanager
async def serve(
    engine: TokenProvider,
    chat_tokenizer: ChatTokenizer,
    store: SessionStore,
    settings: ServerSettings | None = None,
    *,
    around: Around = alone,
    clock: Clock = time.time,
) -> AsyncIterator[RunningServer]:
    """Run a session server in the current loop.

    At the end, turns in flight get `stop_grace_s` to finish. The others are stored and answered 503: the next server
    continues them.

    Enters `engine` and `store`. Raises `HarnessError` if the address cannot be bound, or the engine lacks the required
    repeat guard.
    """
    settings = settings or ServerSettings()
    _check(settings, store)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listening(settings.host, settings.port))
        await stack.enter_async_context(store)
        metrics = ServerMetrics()
        tracer = await stack.enter_async_context(_tracing(settings, metrics))
        gatekeeper = Gatekeeper(store, metrics, pause_timeout_s=settings.pause_timeout_s, clock=clock)
        await gatekeeper.restore()
        await stack.enter_async_context(_prepared(engine, gatekeeper.gate, settings))
        check = _prove_guard(settings, engine, chat_tokenizer, metrics)
        turns = TurnService(engine, chat_tokenizer, store, metrics, gatekeeper, settings, check, clock, tracer)
        await stack.enter_async_context(turns)
        await turns.live.restore()
        server = SessionServer(turns)
        if tracer is not None:
            stack.callback(tracer.tell_open_sessions, server.sessions)
        restored = await server.sessions.restore()
        engine.workers.observe(metrics)
        # Under a pause, even one under a drain, engines may be idle on purpose.
        engine.workers.excuse_silence(lambda: any(hold.kind is HoldKind.PAUSE for hold in gatekeeper.gate.holds))
        for chore in _chores(server, gatekeeper, turns, settings):
            await stack.enter_async_context(running(chore))
        app = await stack.enter_async_context(around(server))
        connections = ServerConnections(connection_bounds(settings), server.errors.refuse_connection)
        await stack.enter_async_context(running(connections.watch_for_ever()))
        embedded = await stack.enter_async_context(answering(HangingUpServer(app, connections), listener))
        host, port = listener.getsockname()[:2]
        url = f"http://{host}:{port}"
        _log_start(url, engine, chat_tokenizer, settings, restored)

        def hang_up() -> None:
            if tracer is not None:
                tracer.sender.hurry()
            embedded.hang_up()

        try:
            yield RunningServer(url, server, restored, hang_up)
        finally:
            if not embedded.force_exit:  # after a simulated kill, clients must get no answers
                await turns.callers.send_away(grace_s=settings.stop_grace_s)


def _check(settings: ServerSettings, store: SessionStore) -> None:
    settings.check()
    if settings.idle_page_out_s is not None and not store.reads_back:
        raise ScenarioError(
            "idle_page_out_s: expected a store in a file (--store FILE), from which sessions that are paged out"
            " (--idle-page-out) are read back; got one that keeps nothing"
        )


def _prepared(engine: TokenProvider, gate: Gate, settings: ServerSettings) -> TokenProvider:
    # Controllers cannot resume an engine through a server that waits for it at startup. The gate stays closed
    # meanwhile.
    is_ours = any(hold.engines and hold.work for hold in gate.holds)
    if (gate.must_wake_engines or is_ours) and isinstance(engine, ContinuesAtEntry):
        engine.continues_at_entry = True
    if settings.allow_forced_tokens and isinstance(engine, ProvesScripts):
        engine.proves_scripts = True
    return engine


async def serve_forever(
    engine: TokenProvider,
    chat_tokenizer: ChatTokenizer,
    store: SessionStore,
    settings: ServerSettings,
    started: Callable[[RunningServer], None],
    *,
    around: Around = alone,
) -> None:
    """Run a session server until SIGINT or SIGTERM; call `started` once it answers. A second signal is abrupt."""
    sys.setswitchinterval(SWITCH_S)
    async with serve(engine, chat_tokenizer, store, settings, around=around) as server:

        def hang_up() -> None:
            server.server.callers.dismiss(hand_over_s=0.0)
            server.hang_up()

        stop = stop_at_signals(hang_up)
        started(server)
        await stop.wait()


def _prove_guard(
    settings: ServerSettings, engine: TokenProvider, chat_tokenizer: ChatTokenizer, metrics: ServerMetrics
) -> SignalCheck | None:
    guard = choose_guard(settings.repeat_guard, os.environ)
    if guard is None:
        return None
    require_guard(engine.capabilities, guard)
    metrics.guard_active.set(1)
    return SignalCheck(guard, object_key_ids(chat_tokenizer.tokenizer))


@asynccontextmanager
async def _tracing(settings: ServerSettings, metrics: ServerMetrics) -> AsyncIterator[SessionTracer | None]:
    if settings.otlp_endpoint is None:
        yield None
        return
    from harness.server.telemetry.tracing.sender import SpanSender  # with OpenTelemetry's SDK

    sender = SpanSender(traces_url(settings.otlp_endpoint), metrics)
    async with sender.sending():
        yield SessionTracer(sender)


def _chores(
    server: SessionServer, gatekeeper: Gatekeeper, turns: TurnService, settings: ServerSettings
) -> Iterator[Coroutine[Any, Any, None]]:
    yield gatekeeper.expire_in_time()
    yield server.left_engines.wake_for_ever()
    if settings.teachers:
        yield server.teachers.work_for_ever()
    if settings.idle_page_out_s is not None:
        yield repeat(server.sessions.page_out_idle)
    if settings.idle_ttl_s is not None:
        yield repeat(server.sessions.expire)
    if settings.keep_closed_s is not None:
        yield forget_closed_sessions(turns.store, settings.keep_closed_s)
    yield turns.live.follow()


def connection_bounds(settings: ServerSettings) -> ConnectionBounds:
    """Return the limits on connections and their speed."""
    limits = settings.limits
    connections, descriptors = limits.connections, descriptor_limit()
    if descriptors is not None:  # each turn has two connections: client and engine
        connections = min(connections, max(1, (descriptors - _OWN_DESCRIPTORS) // 2))
    return ConnectionBounds(
        connections=connections,
        header_bytes=limits.header_bytes,
        header_lines=limits.header_lines,
        header_s=limits.header_seconds,
        body_s=limits.body_seconds,
        write_s=settings.write_timeout_s,
    )


def _log_start(
    url: str, engine: TokenProvider, chat_tokenizer: ChatTokenizer, settings: ServerSettings, restored: int
) -> None:
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
    for fault in family.faults:
        event = "template_loses_reasoning" if fault in family.reasoning_faults else "template_loses_tools"
        log.warning(event, fault=fault)
    log.info("server_started", url=url, engine=engine.capabilities.engine, restored=restored)
    if not settings.admin_token:
        log.warning("server_is_open", url=url, means="every client that reaches it may do everything")
