"""A proxy in front of a real engine server that spoils single control calls, as a network or a server does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from tests.fake_engines.fake_server import Fault


class FaultyProxy:
    """Passes everything on to `target`, but for what `faults` says of POSTs to a path."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.url = ""
        self.faults: dict[str, list[Fault | None]] = {}
        """By path, what becomes of the next POSTs there, in their order; None lets one through."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Serve one request."""
        fault = None
        if request.method == "POST" and self.faults.get(request.path):
            fault = self.faults[request.path].pop(0)
        if fault is Fault.REFUSED:
            return web.json_response({"error": {"message": "so refused it was", "code": 500}}, status=500)
        async with (
            aiohttp.ClientSession(auto_decompress=False) as http,
            http.request(
                request.method,
                self.target + request.path_qs,
                data=await request.read(),
                headers={"content-type": request.content_type, **_named(request)},
                timeout=aiohttp.ClientTimeout(total=None),
            ) as answer,
        ):
            content = await answer.read()
        if fault is Fault.LOST:
            return web.json_response({"error": {"message": "so lost it was", "code": 500}}, status=500)
        return web.Response(status=answer.status, body=content, content_type=answer.content_type)


def _named(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in ("x-request-id", "x-session-id") if name in request.headers}


@asynccontextmanager
async def proxied(target: str) -> AsyncIterator[FaultyProxy]:
    """A proxy for `target`, on loopback."""
    proxy = FaultyProxy(target)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", proxy.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        proxy.url = f"http://{host}:{port}"
        yield proxy
    finally:
        await runner.cleanup()
