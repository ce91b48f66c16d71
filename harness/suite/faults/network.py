"""Breakable network before engine servers: a loopback proxy each.

A fault is armed for a request id, which the proxy finds in the body. The answer is then a 500, late, broken off, not
JSON, or never comes. A killed network refuses and resets connections. Otherwise traffic passes unchanged.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

import aiohttp
from aiohttp import web

from harness.engines.remote.address import EngineAddress
from harness.suite.faults.engine_seam import DEADLINE_S, NetworkFault
from harness.suite.scenarios.fault import Action

_LOOPBACK = "127.0.0.1"
_MAX_BODY_BYTES = 1 << 30
_REQUEST_ID = re.compile(rb'"(?:rid|request_id)"\s*:\s*"([0-9a-f]{32})"')
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "host", "upgrade", "proxy-connection", "te"})
_NO_JSON = b'{"text": "and then it bro'
_EVENT = b"data: " + _NO_JSON + b"\n\ndata: [DONE]\n\n"


class _Broken(Exception):
    """The connection was reset."""


@dataclass(eq=False, slots=True)
class _Passage:
    request: web.Request
    faults: list[NetworkFault] = field(default_factory=list)
    in_the_answer: set[Action] = field(default_factory=set)
    """Faults of the next chunk, which breaks off, or of the rest, which is not JSON."""

    def reset(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()

    async def apply_faults(self, *, has_begun: bool) -> web.Response | None:
        """Apply faults in order. Returns an answer if a fault is one. Raises `_Broken`."""
        while self.faults:
            fault = self.faults.pop(0)
            match fault.action:
                case "slow_network":
                    await asyncio.sleep(fault.seconds or 0)
                case "engine_hang":
                    await asyncio.sleep(fault.seconds or DEADLINE_S)
                    raise _Broken
                case "malformed_reply":
                    self.in_the_answer.add(fault.action)
                case "engine_500" if not has_begun:
                    return web.json_response({"error": {"message": "a fault of the scenario"}}, status=500)
                case _ if has_begun:
                    raise _Broken
                case _:
                    self.in_the_answer.add("cut_connection")
        return None


class FaultProxy:
    """Proxy in front of `upstream`; a context manager."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream.rstrip("/")
        self._armed: defaultdict[str, list[NetworkFault]] = defaultdict(list)
        self._passages: dict[str, _Passage] = {}
        self._stack = AsyncExitStack()
        self._port = 0

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None)
        self._http = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                timeout=timeout,
                skip_auto_headers=("accept-encoding",),  # pass the client's choice and the answer unchanged
                auto_decompress=False,
                trust_env=False,
            )
        )
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        self._stack.push_async_callback(self._runner.cleanup)
        await self.revive()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        return f"http://{_LOOPBACK}:{self._port}"

    def arm(self, request_id: str, fault: NetworkFault) -> None:
        passage = self._passages.get(request_id)
        if passage is None:
            self._armed[request_id].append(fault)
        elif fault.action in ("cut_connection", "engine_500"):
            passage.reset()
        else:
            passage.faults.append(fault)

    def disarm(self, request_id: str) -> None:
        self._armed.pop(request_id, None)

    async def kill(self) -> None:
        """Stop listening, and reset every connection."""
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._site.stop()

    async def revive(self) -> None:
        """Listen again, at the same address."""
        self._site = web.TCPSite(self._runner, _LOOPBACK, self._port, reuse_address=True)
        await self._site.start()
        self._port = self._runner.addresses[-1][1]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        found = _REQUEST_ID.search(body)
        request_id = found.group(1).decode() if found else ""
        passage = _Passage(request, self._armed.pop(request_id, []))
        if request_id:
            self._passages[request_id] = passage
        try:
            answer = await passage.apply_faults(has_begun=False)
            return answer or await self._pass_on(request, body, passage)
        except (_Broken, aiohttp.ClientError):
            passage.reset()
            return web.Response(status=502)  # the connection is gone
        finally:
            # A retry may have replaced it.
            if self._passages.get(request_id) is passage:
                del self._passages[request_id]

    async def _pass_on(self, request: web.Request, body: bytes, passage: _Passage) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = self._upstream + request.path_qs
        async with self._http.request(request.method, url, data=body, headers=headers) as upstream:
            if "malformed_reply" in passage.in_the_answer:
                await upstream.read()
                is_stream = upstream.content_type == "text/event-stream"
                return web.Response(body=_EVENT if is_stream else _NO_JSON, content_type=upstream.content_type)
            kept = {name: value for name, value in upstream.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=upstream.status, headers=kept)
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                await passage.apply_faults(has_begun=True)
                if "cut_connection" in passage.in_the_answer:
                    await response.write(chunk[: len(chunk) // 2])
                    raise _Broken
                await response.write(chunk)
                if "malformed_reply" in passage.in_the_answer:
                    await response.write(_EVENT)
                    break
            await response.write_eof()
            return response


class FaultyNetwork:
    def __init__(self, proxies: Sequence[FaultProxy]) -> None:
        self._proxies = proxies

    def arm(self, request_id: str, fault: NetworkFault) -> None:
        for proxy in self._proxies:
            # Any of the servers may get the request.
            proxy.arm(request_id, fault)

    def disarm(self, request_id: str) -> None:
        for proxy in self._proxies:
            proxy.disarm(request_id)

    async def kill(self, first: int | None = None) -> None:
        """Cut off the `first` servers, or all."""
        await asyncio.gather(*(proxy.kill() for proxy in self._proxies[:first]))

    async def revive(self, first: int | None = None) -> None:
        await asyncio.gather(*(proxy.revive() for proxy in self._proxies[:first]))


@asynccontextmanager
async def open_network(urls: Sequence[str]) -> AsyncIterator[tuple[Sequence[str], FaultyNetwork]]:
    """Yield proxy addresses for `urls`, and their network."""
    async with AsyncExitStack() as stack:
        addresses = [EngineAddress.parse(url) for url in urls]
        proxies = [await stack.enter_async_context(FaultProxy(address.url)) for address in addresses]
        reached = [address.behind(proxy.url) for address, proxy in zip(addresses, proxies, strict=True)]
        yield reached, FaultyNetwork(proxies)
