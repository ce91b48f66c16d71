"""Whose connection ends when, on a clock that only the test moves: nobody watches these connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from harness.errors import RequestError
from harness.machine.asgi import EmbeddedServer, answering, listening
from harness.machine.http_bounds import BoundedProtocol, ConnectionBounds, ServerConnections
from tests.session_servers.served import PATIENCE_S, eventually

BOUNDS = ConnectionBounds(
    connections=2, header_bytes=1 << 16, header_lines=100, header_s=30.0, body_s=300.0, write_s=60.0
)
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = b"4\r\nbody\r\n"


@dataclass
class Bounded:
    """A server, and how far its application has come."""

    port: int
    connections: ServerConnections
    refused: list[RequestError]
    begun: asyncio.Semaphore
    may_answer: asyncio.Event
    pieces: asyncio.Queue[bytes]
    may_read: asyncio.Event

    @asynccontextmanager
    async def connect(self) -> AsyncIterator["Agent"]:
        """One more connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Agent(reader, writer)
        finally:
            writer.transport.abort()

    def protocol(self) -> BoundedProtocol:
        """The only connection."""
        (protocol,) = self.connections.connections
        assert isinstance(protocol, BoundedProtocol)
        return protocol


@dataclass
class Agent:
    """The other end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def is_answered(self, request: bytes = b"") -> bool:
        """Whether an answer comes, or the end."""
        async with asyncio.timeout(PATIENCE_S):
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                self.writer.write(request)
                return (await self.reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
        return False


@asynccontextmanager
async def bounded() -> AsyncIterator[Bounded]:
    """A server whose application takes a body piece by piece and answers it when it may."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        server.begun.release()
        more = True
        while more:
            await server.may_read.wait()
            message = await receive()
            more = message.get("more_body", False)
            server.pieces.put_nowait(message.get("body", b""))
        await server.may_answer.wait()
        await Response("ok")(scope, receive, send)

    def refuse(error: RequestError) -> Response:
        server.refused.append(error)
        return Response(status_code=error.status)

    connections = ServerConnections(BOUNDS, refuse)
    config = uvicorn.Config(app, log_config=None, lifespan="off", http=BoundedProtocol, ws="none")
    embedded = EmbeddedServer(config)
    embedded.server_state = connections
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        server = Bounded(port, connections, [], asyncio.Semaphore(0), asyncio.Event(), asyncio.Queue(), asyncio.Event())
        server.may_read.set()
        server.may_answer.set()
        async with answering(embedded, listener):
            yield server
            server.may_read.set()
            server.may_answer.set()
            connections.reset_all()


async def test_at_the_limit_the_connection_that_has_been_idle_longest_makes_room():
    """Agents think for minutes and keep their connections; whoever comes has something to ask."""
    async with bounded() as server, server.connect() as first, server.connect() as second:
        assert await first.is_answered(GET)
        assert await second.is_answered(GET)
        assert await first.is_answered(GET)
        async with server.connect() as third:
            assert await third.is_answered(GET)
        assert not await second.is_answered()
        assert not server.refused
        assert await first.is_answered(GET)


async def test_at_the_limit_nothing_that_goes_on_makes_room():
    """A request that arrives, and one that is answered: the new connection is reset."""
    async with bounded() as server, server.connect() as arriving, server.connect() as waiting:
        assert await arriving.is_answered(GET)
        server.may_answer.clear()
        waiting.writer.write(GET)
        arriving.writer.write(GET[:9])
        for _ in range(2):
            await server.begun.acquire()
        await eventually(lambda: not server.connections.idle)
        async with server.connect() as third:
            assert not await third.is_answered(GET)
        assert [error.limit for error in server.refused] == ["connections"]
        server.may_answer.set()
        assert await waiting.is_answered()
        assert await arriving.is_answered(GET[9:])


async def test_a_line_end_behind_a_body_begins_no_request():
    """Before the answer and behind it; the connection is kept."""
    async with bounded() as server, server.connect() as agent:
        server.may_answer.clear()
        agent.writer.write(POST + b"0\r\n\r\n")
        await server.pieces.get()
        agent.writer.write(b"\r\n")
        async with server.connect():  # it is accepted after those bytes have come
            await eventually(lambda: len(server.connections.connections) == 2)
        await eventually(lambda: len(server.connections.connections) == 1)
        server.may_answer.set()
        assert await agent.is_answered()
        agent.writer.write(b"\r\n")
        async with server.connect():
            await eventually(lambda: len(server.connections.connections) == 2)
        await eventually(lambda: len(server.connections.connections) == 1)
        server.protocol().look(asyncio.get_running_loop().time() + 2 * BOUNDS.header_s)
        assert await agent.is_answered(GET)


async def test_a_body_that_moves_may_take_any_time():
    """What is streamed through has no end of its own; what stands still has."""
    async with bounded() as server, server.connect() as agent:
        now = asyncio.get_running_loop().time()
        agent.writer.write(POST)
        for _ in range(3):
            agent.writer.write(PIECE)
            await server.pieces.get()
            now += 0.9 * BOUNDS.body_s
            server.protocol().look(now)
        server.protocol().look(now + 1.1 * BOUNDS.body_s)
        assert not await agent.is_answered(PIECE + b"0\r\n\r\n")


async def test_the_time_in_which_nobody_takes_a_body_is_not_its_senders():
    async with bounded() as server, server.connect() as agent:
        server.may_read.clear()
        agent.writer.write(POST + b"30000\r\n" + b"x" * 0x30000)
        await eventually(lambda: bool(server.connections.connections) and server.protocol().flow.read_paused)
        now = asyncio.get_running_loop().time()
        for _ in range(3):
            now += 2 * BOUNDS.body_s
            server.protocol().look(now)
        server.may_read.set()
        assert await agent.is_answered(b"\r\n0\r\n\r\n")


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAAAAMAAAAA\r\n"


@pytest.mark.parametrize("pieces", ["at once", "head and body", "byte by byte"])
@pytest.mark.parametrize(
    ("framing", "body"),
    [(b"content-length: 4\r\n", b"body"), (b"transfer-encoding: chunked\r\n", b"4\r\nbody\r\n0\r\n\r\n"), (b"", b"")],
)
async def test_an_offer_of_another_protocol_is_declined_and_the_body_is_served(
    framing: bytes, body: bytes, pieces: str
):
    """Java's client offers HTTP/2 with its first request; what follows on the connection is served as well."""
    head = b"POST /x HTTP/1.1\r\nhost: x\r\n" + OFFER + framing + b"\r\n"
    async with bounded() as server, server.connect() as agent:
        server.may_read.set()
        server.may_answer.set()
        for _ in range(2):
            sent = {"at once": [head + body], "head and body": [head, body]}.get(pieces, [])
            for piece in sent or [bytes([byte]) for byte in head + body]:
                agent.writer.write(piece)
                await agent.writer.drain()
                await asyncio.sleep(0)
            assert await agent.is_answered()
            taken = b"".join(server.pieces.get_nowait() for _ in range(server.pieces.qsize()))
            assert taken == (b"body" if body else b"")


@pytest.mark.parametrize("offer", [b"", OFFER])
async def test_a_tunnel_is_a_request_without_a_body(offer: bytes):
    async with bounded() as server, server.connect() as agent:
        server.may_read.set()
        server.may_answer.set()
        agent.writer.write(b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n")
        assert await asyncio.wait_for(agent.reader.read(100), PATIENCE_S)


async def test_a_request_that_offers_another_protocol_is_bounded_as_any_other():
    """Its head counts once, and another one behind it is not read."""
    async with bounded() as server, server.connect() as agent:
        offer = b"GET / HTTP/1.1\r\nhost: x\r\n" + OFFER
        agent.writer.write(offer + b"x: y\r\n" * 200 + b"\r\n")
        assert not await agent.is_answered()

    assert [error.limit for error in server.refused] == ["header_lines"]
