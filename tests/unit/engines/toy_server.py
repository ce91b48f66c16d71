"""An engine server that says one thing, over a protocol of its own: the first of the two files of a toy engine."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def toy_server(says: Sequence[int]) -> AsyncIterator[tuple[str, list[str]]]:
    """Its base address, and the requests it has had, by method and path."""
    had: list[str] = []

    async def say(request: web.Request) -> web.Response:
        had.append("POST /say")
        asked = await request.json()
        ids = list(says)[: asked["at_most"]]
        return web.json_response({"after": len(asked["ids"]), "ids": ids, "logprobs": [-0.5] * len(ids)})

    async def quiet(request: web.Request) -> web.Response:
        had.append(f"{request.method} {request.path}")
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/say", say), web.post("/quiet", quiet)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}", had
    finally:
        await runner.cleanup()
