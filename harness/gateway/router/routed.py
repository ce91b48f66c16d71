"""The session server and the router at one URL.

    /sessions, /sessions/...             sessions
    /v1/..., /v1beta/... with a key      sessions, if it is the key of one
    /router/health, /router/metrics      `/health` and `/metrics` of the session server
    /router                              gateway and workers
    anything else                        the router: control verbs to every worker, the rest to the gateway

An admin token protects everything but sessions. It and session keys stop here; gateway and workers get the operator's
key. Sessions never pass the gateway: the pool picks their worker.
"""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from harness.credentials import without_credentials
from harness.engines.kinds import server_kinds
from harness.engines.pool.discovered import DiscoveredPool, FoundWorker
from harness.engines.remote.address import ENGINE_KEY, EngineAddress
from harness.engines.repeat_guard import choose_guard
from harness.engines.sglang_server.requests import PAUSES
from harness.errors import HarnessError, LaneError, ScenarioError, Unauthorized
from harness.gateway.router.gateway_program import GatewayProgram
from harness.gateway.router.trainer_verbs import TrainerVerbs
from harness.machine.asgi import listening
from harness.server.app import SessionServer
from harness.server.http.access import credential, require_admin
from harness.server.http.responses import error_response
from harness.server.registry import API_KEY_PREFIX
from harness.server.serving import RunningServer, serve_forever
from harness.server.settings import ServerSettings
from harness.server.store.base import SessionStore
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.tokenizer import Tokenizer
from server_patch.background import running
from server_patch.router.app import RouterFront, open_http
from server_patch.router.gateway import Gateway, GatewayError, attach, launch
from server_patch.router.verbs import VerbError, VerbOrder

_OWN = {"/router/health": "/health", "/router/metrics": "/metrics"}
_CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"x-goog-api-key"})
_FOR_US_ALONE = frozenset({"HARNESS_ADMIN_TOKEN", "HARNESS_ENGINE_KEY"})

FindKey = Callable[[str], str]
"""Returns the key of the worker at a URL."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Choice of a gateway, and limits of its workers."""

    worker_urls: tuple[str, ...] = ()
    """First workers of a gateway started here; each may name its key (`EngineAddress`)."""
    router_url: str | None = None
    """Running gateway; may name a key for requests without one."""
    engine_key: str = field(default="", repr=False)
    """Default key of workers; empty reads the environment."""
    gateway_arguments: tuple[str, ...] = ()
    gateway_log: Path | None = None
    """Output of the gateway; None discards it at the end."""
    worker_limit: int | None = 256
    """Session requests in flight per worker."""
    queue_timeout_s: float = 600.0
    """Time that a session request waits for a worker."""
    start_timeout_s: float = 600.0
    """Time to wait for a first worker."""
    interval_s: float = 1.0
    """Seconds between polls of the workers."""

    def check(self) -> None:
        """Raise `ScenarioError` unless exactly one gateway is given, by valid addresses."""
        for url in (*self.worker_urls, *([self.router_url] if self.router_url else ())):
            EngineAddress.parse(url)
        if bool(self.worker_urls) == (self.router_url is not None):
            raise ScenarioError(
                "expected either --worker-urls URL[,URL], to start a gateway, or --router-url URL of one"
            )


@dataclass(frozen=True, slots=True)
class RoutedApp:
    """Application that sends each path to sessions or the router."""

    sessions: ASGIApp
    router: ASGIApp
    admin_token: str | None = field(default=None, repr=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        if _is_of_sessions(scope):
            await self.sessions(scope, receive, send)
            return
        if scope["path"] in _OWN:
            own = _OWN[scope["path"]]
            await self.sessions({**scope, "path": own, "raw_path": own.encode()}, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            require_admin(headers, self.admin_token)
        except Unauthorized as error:
            await error_response(error, to_agent=True)(scope, receive, send)
            return
        # The credential was for us: do not pass it on.
        if self.admin_token or credential(headers).startswith(API_KEY_PREFIX):
            kept = [(name, value) for name, value in scope["headers"] if name.lower() not in _CREDENTIALS]
            scope = {**scope, "headers": kept}
        try:
            await self.router(scope, receive, send)
        except HarnessError as error:  # a verb that sessions refuse now: no worker got it
            await error_response(error, to_agent=False)(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Routed:
    """An engine behind a gateway, and the router in front of it."""

    pool: DiscoveredPool
    gateway: Gateway
    front: RouterFront
    admin_token: str | None = None

    @asynccontextmanager
    async def around(self, server: SessionServer) -> AsyncIterator[ASGIApp]:
        """Yield both at one URL; sessions take part in the router's verbs."""
        verbs = TrainerVerbs(server)
        async with running(verbs.follow()):
            self.front.attend(verbs.carry_out)
            yield RoutedApp(server.app(), self.front, admin_token=self.admin_token)


@asynccontextmanager
async def open_routed(
    settings: RouterSettings,
    program: GatewayProgram | None,
    *,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    admin_token: str | None = None,
    is_guarded: bool = False,
) -> AsyncIterator[Routed]:
    """Open the gateway and its worker list. The caller enters the pool.

    Workers with another tokenizer do not join. `is_guarded` promises that clients wait until the pool's workers have
    proven the repeat guard. Raises `LaneError` without a gateway.
    """
    async with AsyncExitStack() as stack:
        workers = [EngineAddress.parse(url) for url in settings.worker_urls]
        keys = _key_finder(workers, settings.engine_key)
        address = EngineAddress.parse(settings.router_url) if settings.router_url else None
        # A gateway that is started here is asked for no key.
        gateway_key = address.api_key(os.environ) if address and address.key_variable else ""
        http = await stack.enter_async_context(open_http(lambda _origin: gateway_key))
        to_workers = await stack.enter_async_context(open_http(keys))
        gateway = await _gateway(settings, program, http, keys, stack)

        def describe() -> dict[str, Any]:
            sessions = {"workers": [status._asdict() for status in pool.workers]}
            return {"sessions": {**sessions, "refused": pool.refused, "waiting": pool.waiting}}

        front = RouterFront(
            http,
            gateway,
            to_workers=to_workers,
            also=[worker.url for worker in workers],
            heard=lambda order: _heed(pool, order),
            describe=describe,
            # Only if every worker of the gateway is in the pool, which has proven its guard.
            is_guarded=lambda: (
                is_guarded
                and {worker.url for worker in front.workers.current} <= {status.name for status in pool.workers}
            ),
        )
        await stack.enter_async_context(front.following(settings.interval_s))
        pool = DiscoveredPool(
            lambda: _find_workers(front, vocab_size, tokenizer, keys),
            interval_s=settings.interval_s,
            start_timeout_s=settings.start_timeout_s,
            limit=settings.worker_limit,
            queue_timeout_s=settings.queue_timeout_s,
        )
        yield Routed(pool, gateway, front, admin_token)


async def route_forever(
    routing: RouterSettings,
    program: GatewayProgram | None,
    chat_tokenizer: ChatTokenizer,
    store: SessionStore,
    settings: ServerSettings,
    *,
    started: Callable[[RunningServer, Gateway], None],
) -> None:
    """Run both until SIGINT or SIGTERM. Call `started` once they answer."""
    tokenizer = chat_tokenizer.tokenizer
    is_guarded = choose_guard(settings.repeat_guard, os.environ) is not None
    opening = open_routed(
        routing,
        program,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        admin_token=settings.admin_token,
        is_guarded=is_guarded,
    )
    with listening(settings.host, settings.port):
        pass  # fail on a taken port before starting a gateway; the real bind comes last
    async with opening as routed:

        def answers(running: RunningServer) -> None:
            started(running, routed.gateway)

        await serve_forever(routed.pool, chat_tokenizer, store, settings, answers, around=routed.around)


def _key_finder(workers: Sequence[EngineAddress], given: str) -> FindKey:
    """Return a function of a URL; others than `workers` use `given` or the environment's. Raises `ScenarioError`."""
    own = {_origin(each.url): each.api_key(os.environ, given) for each in workers}
    default = given or os.environ.get(ENGINE_KEY, "")
    return lambda url: own.get(_origin(url), default)


def _origin(url: str) -> str:
    return str(URL(url).origin())


async def _gateway(
    settings: RouterSettings,
    program: GatewayProgram | None,
    http: aiohttp.ClientSession,
    keys: FindKey,
    stack: AsyncExitStack,
) -> Gateway:
    try:
        if settings.router_url is not None:
            return await attach(http, EngineAddress.parse(settings.router_url).url)
        assert program is not None, "without the address of a gateway, one is started"
        log_file = settings.gateway_log or Path(stack.enter_context(TemporaryDirectory())) / "gateway.log"
        urls = [EngineAddress.parse(url).url for url in settings.worker_urls]
        ours = {name: value for name, value in os.environ.items() if name not in _FOR_US_ALONE}
        launching = launch(
            http,
            program.executable,
            program.kind,
            urls,
            log_file=log_file,
            arguments=settings.gateway_arguments,
            env=without_credentials(ours),
            keys={url: keys(url) for url in urls},
        )
        return await stack.enter_async_context(launching)
    except GatewayError as error:
        raise LaneError(str(error)) from error


def _find_workers(front: RouterFront, vocab_size: int, tokenizer: Tokenizer | None, keys: FindKey) -> list[FoundWorker]:
    found = [worker for worker in front.workers.current if worker.engine is not None]
    about: dict[str, Any] = {"vocab_size": vocab_size, "tokenizer": tokenizer}
    kinds = server_kinds()
    return [
        FoundWorker(each.url, partial(kinds[str(each.engine)].open, each.url, api_key=keys(each.url), **about))
        for each in found
    ]


def _heed(pool: DiscoveredPool, order: VerbOrder) -> None:
    # Workers that join during a pause must not serve.
    if order.verb == "/continue_generation":
        pool.workers.expect_pause(None)
    elif order.verb == "/pause_generation":
        with suppress(VerbError, KeyError, TypeError):  # workers refuse an unknown mode, and nothing changes
            pool.workers.expect_pause(PAUSES[order.fields.get("mode") or "abort"])


def _is_of_sessions(scope: Scope) -> bool:
    path: str = scope["path"]
    if path == "/sessions" or path.startswith("/sessions/"):
        return True
    return path.startswith(("/v1/", "/v1beta/")) and credential(Headers(scope=scope)).startswith(API_KEY_PREFIX)
