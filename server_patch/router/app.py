"""The router as an ASGI application.

    /abort_request, /pause_generation, /continue_generation, /flush_cache,
    /update_weights_from_disk, _distributed, _tensor,
    /update_weight_version                                  to every worker, with a report per worker
    GET /router                                             gateway, its restrictions, workers
    anything else                                           to the gateway

Authenticates no client and knows no session.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import aiohttp
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server_patch.background import running
from server_patch.router.fan_out import Updates, WorkerList, fan_out, report, status_of
from server_patch.router.gateway import Gateway
from server_patch.router.passthrough import Passthrough
from server_patch.router.verbs import VERBS, Tell, VerbOrder, VerbResult

_CONNECT_S = 10.0
_KEEP_ALIVE_S = 4.0  # shorter than any server's, so that no request goes out on a connection that is being closed
_READ_BUFFER_BYTES = 1 << 20


Attend = Callable[[VerbOrder, Tell], Awaitable[Sequence[VerbResult]]]
"""Function that wraps `Tell` with work before and after."""

KeyOf = Callable[[str], str]
"""API key of an origin (`http://host:port`), or ""."""


def _no_key(_origin: str) -> str:
    return ""


async def _tell_at_once(_order: VerbOrder, tell: Tell) -> Sequence[VerbResult]:
    return await tell()


@asynccontextmanager
async def open_http(key_of: KeyOf = _no_key) -> AsyncIterator[aiohttp.ClientSession]:
    """Open connections without cookies, proxies, decompression or limit. `key_of` supplies missing authorization."""

    async def with_key(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        key = key_of(str(request.url.origin()))
        if key and "authorization" not in request.headers:
            request.headers["authorization"] = f"Bearer {key}"
        return await send(request)

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("accept-encoding",),
        auto_decompress=False,
        read_bufsize=_READ_BUFFER_BYTES,
        trust_env=False,
        middlewares=(with_key,),
    ) as http:
        yield http


class RouterFront:
    """The application.

    Args:
        http: From `open_http`, for the gateway.
        to_workers: The same for the workers, with other keys.
        gateway: Target of the passed requests.
        also: Workers that the gateway was started with.
        heard: Called with each verb before the fan-out.
        describe: More entries for `GET /router`.
        is_guarded: True if all workers have proven the repeat guard; answers then report it.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        gateway: Gateway,
        *,
        to_workers: aiohttp.ClientSession | None = None,
        also: Sequence[str] = (),
        heard: Callable[[VerbOrder], None] | None = None,
        describe: Callable[[], dict[str, Any]] = dict,
        is_guarded: Callable[[], bool] = bool,
    ) -> None:
        self._to_workers = to_workers or http
        self.workers = WorkerList(http, gateway.url, also, self._to_workers)
        self._gateway = gateway
        self._pass = Passthrough(http, gateway.url, is_guarded=is_guarded)
        self._updates = Updates()
        self._heard = heard
        self._attend: Attend = _tell_at_once
        self._describe = describe

    def attend(self, attend: Attend) -> None:
        """Set what carries out verbs. The caller answers its errors."""
        self._attend = attend

    @asynccontextmanager
    async def following(self, interval_s: float = 1.0) -> AsyncIterator[None]:
        await self.workers.look()
        async with running(self.workers.follow(interval_s)):
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1011, "reason": "the router passes HTTP only"})
            return
        path, method = scope["path"], scope["method"]
        if path in VERBS and method in VERBS[path].methods:
            answer = await self._fan_out(Request(scope, receive))
        elif path == "/router" and method == "GET":
            answer = _json(self._status())
        else:
            await self._pass(scope, receive, send)
            return
        await answer(scope, receive, send)

    async def _fan_out(self, request: Request) -> Response:
        body = await request.body()
        order = VerbOrder(request.url.path, request.method, request.url.query, body)

        async def tell() -> Sequence[VerbResult]:
            await self.workers.look()  # include a worker added a moment ago
            if self._heard is not None:
                self._heard(order)
            return await fan_out(self._to_workers, self.workers.current, order, updates=self._updates)

        results = await self._attend(order, tell)
        return _json(report(order, results), status_of(results))

    def _status(self) -> dict[str, Any]:
        gateway = {
            "url": self._gateway.url,
            "kind": str(self._gateway.kind),
            "restricted": bool(self._gateway.restrictions),
            "restrictions": list(self._gateway.restrictions),
        }
        return {"gateway": gateway, "workers": [asdict(each) for each in self.workers.current], **self._describe()}


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")
