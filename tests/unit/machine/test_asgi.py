"""An application on a socket of its own: how its server ends."""

import asyncio
import socket

import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from harness.machine.asgi import EmbeddedServer, answering, listening

PATIENCE_S = 30
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_what_is_being_answered_is_answered_before_the_end():
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        await may_answer.wait()
        await Response("ok")(scope, receive, send)

    server = EmbeddedServer(uvicorn.Config(app, log_config=None, lifespan="off"))
    with listening("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        async with asyncio.timeout(PATIENCE_S):
            async with answering(server, listener):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(GET)
                await asked.wait()
                server.end()
                await _refused(address)
                may_answer.set()
            answer = await reader.read()
            writer.close()

    assert answer.endswith(b"ok")


async def test_what_never_ends_is_cancelled():
    """An application that waits for nothing holds no server."""
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=0)
    with listening("127.0.0.1", 0) as listener:
        async with asyncio.timeout(PATIENCE_S):
            async with answering(EmbeddedServer(config), listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(GET)
                await asked.wait()
            await cancelled.wait()
            writer.close()


async def _refused(address: tuple[str, int]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket() as client:
            client.setblocking(False)
            try:
                await loop.sock_connect(client, address)
            except ConnectionRefusedError:
                return
        await asyncio.sleep(0.005)
