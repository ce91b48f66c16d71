"""One engine server's HTTP as it comes over the wire, broken in every way that a server can break it."""

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from harness.engines.remote.http_client import EngineClient, HttpAnswer, HttpCall
from harness.errors import EngineConnectionLost, EngineRejected, EngineUnavailable
from tests.session_servers.served import eventually

GET = HttpCall("GET", "/x", 30.0)
GENERATION = HttpCall("POST", "/x", 30.0, [b'{"a":', b"1}"], request_id="r")
BODY = b'{"x": 1}'
BY_LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n" + BODY
IN_CHUNKS = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n"
    + BODY[:3]
    + b"\r\n5\r\n"
    + BODY[3:]
    + b"\r\n0\r\n\r\n"
)
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\n\r\n" + BODY
ANNOUNCED = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + BY_LENGTH


class RawServer:
    """Answers each request of every connection with the next of `answers`, and hangs up where that is None."""

    def __init__(self, answers: Sequence[bytes | None], cut_into: int) -> None:
        self._answers = iter(answers)
        self._cut_into = cut_into
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; it ends behind an answer that does not say where it ends, or is broken."""
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
                self.requests.append(head + await reader.readexactly(size))
                answer = next(self._answers, None)
                if answer is None:
                    return
                for at in range(0, len(answer), self._cut_into):
                    writer.write(answer[at : at + self._cut_into])
                    await writer.drain()
                if answer not in (BY_LENGTH, IN_CHUNKS, ANNOUNCED):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def asking(*answers: bytes | None, cut_into: int = 1 << 20) -> AsyncIterator[tuple[EngineClient, RawServer]]:
    """A client of a server that answers so."""
    raw = RawServer(answers, cut_into)
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client = EngineClient(f"http://{host}:{port}/base", "sglang", api_key="secret")
    client.open()
    try:
        yield client, raw
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("cut_into", [1, 1 << 20])
@pytest.mark.parametrize("answer", [BY_LENGTH, IN_CHUNKS, UNTIL_CLOSE, ANNOUNCED])
async def test_an_answer_is_read_to_its_end(answer: bytes, cut_into: int):
    """However the server says where that is, and however the network cuts it."""
    async with asking(answer, cut_into=cut_into) as (client, _):
        assert await client.ask(GET) == (200, BODY)


async def test_a_request_is_sent_whole_with_its_key_and_length():
    """The parts of a body follow each other, and the path of the server's address comes first."""
    async with asking(BY_LENGTH) as (client, raw):
        await client.ask(GENERATION)

    head, body = raw.requests[0].split(b"\r\n\r\n")
    assert head.startswith(b"POST /base/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert {b"authorization: Bearer secret", b"content-length: 7"} <= set(head.split(b"\r\n"))
    assert body == b'{"a":1}'


async def test_a_connection_is_kept_for_the_next_question():
    async with asking(BY_LENGTH, IN_CHUNKS, BY_LENGTH) as (client, raw):
        for call in (GET, GENERATION, GET):
            await client.ask(call)
        assert raw.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        None,
        BY_LENGTH[:20],
        BY_LENGTH[:-1],
        IN_CHUNKS[:-9],
        b"<html>not HTTP</html>",
        BY_LENGTH.replace(b"length: 8", b"length: x"),
        b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * (1 << 20) + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
    ids=["nothing", "half a head", "a byte too few", "half a chunk", "no HTTP", "no length", "endless head", "upgrade"],
)
async def test_a_broken_answer_is_a_lost_connection(answer: bytes | None):
    """The generation may have been sampled; the next request finds a connection that works."""
    async with asking(answer, BY_LENGTH) as (client, _):
        with pytest.raises(EngineConnectionLost, match="the connection broke during POST /x of request r"):
            await client.ask(GENERATION)
        assert await client.ask(GENERATION) == (200, BODY)
        assert client.generations_sent == 2


async def test_a_question_over_a_connection_that_was_closed_is_asked_again():
    """A generation is not: nobody can tell whether it was read."""
    async with asking(BY_LENGTH, None, BY_LENGTH, None) as (client, raw):
        await client.ask(GET)
        assert await client.ask(GET) == (200, BODY)
        assert raw.connections == 2
        with pytest.raises(EngineConnectionLost):
            await client.ask(GENERATION)
        assert len(raw.requests) == 4


async def test_an_answer_longer_than_what_is_kept_unread_comes_whole():
    body = bytes(range(256)) * (5 << 12)
    async with asking(b"HTTP/1.1 200 OK\r\n\r\n" + body, cut_into=1 << 16) as (client, _):
        assert (await client.ask(GET)).content == body


STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [b"data: %d\n\n" % number for number in range(5)]
LONG_S = 30.0


class EventServer:
    """Streams what it is told to."""

    def __init__(self) -> None:
        self.writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, which stays open."""
        await reader.readuntil(b"1}")
        writer.write(STREAM)
        self.writer = writer
        await self.send(EVENTS[0])

    async def send(self, *parts: bytes) -> None:
        """Each for itself, so that the client reads it before the next."""
        assert self.writer is not None
        for part in parts:
            self.writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await self.writer.drain()
            for _ in range(5):
                await asyncio.sleep(0.001)


@asynccontextmanager
async def gathering(gather_s: float) -> AsyncIterator[tuple[EventServer, asyncio.Task[None], list[bytes], list[int]]]:
    """A reader of events that has heard the first; the payloads, and how many had come each time it heard of some."""
    events = EventServer()
    server = await asyncio.start_server(events.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client = EngineClient(f"http://{host}:{port}", "sglang")
    client.open()
    payloads: list[bytes] = []
    counts: list[int] = []

    async def hear() -> None:
        counts.append(len(payloads))

    reading = asyncio.create_task(client.gather_events(GENERATION, payloads, hear, gather_s=gather_s))
    try:
        await eventually(lambda: counts == [1])
        yield events, reading, payloads, counts
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await client.close()
        if events.writer is not None:
            events.writer.close()
        server.close()
        await server.wait_closed()


async def test_events_gather_and_their_end_does_not_wait():
    """The first is heard of at once, and what comes by the end together with that."""
    async with gathering(LONG_S) as (server, reading, payloads, counts):
        await server.send(*EVENTS[1:4])
        assert counts == [1]
        await server.send(EVENTS[4], b"data: [DONE]\n\n", b"")
        async with asyncio.timeout(LONG_S / 2):
            await reading

    assert counts == [1, 5]
    assert payloads == [b"0", b"1", b"2", b"3", b"4"]


async def test_events_are_heard_of_while_more_are_to_come():
    """A moment behind the first that nobody has heard of."""
    async with gathering(0.01) as (server, _, _, counts):
        await server.send(EVENTS[1])
        await eventually(lambda: counts[-1] == 2)
        await server.send(EVENTS[2])
        await eventually(lambda: counts[-1] == 3)


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["broken", "cancelled"])
async def test_events_that_were_still_gathering_are_there_when_the_stream_breaks(is_cancelled: bool):
    """Or when its caller has stopped waiting; the beginning of another one is none."""
    async with gathering(LONG_S) as (server, reading, payloads, counts):
        await server.send(*EVENTS[1:4], b"data: ")
        if is_cancelled:
            reading.cancel()
        else:
            assert server.writer is not None
            server.writer.transport.abort()
        with pytest.raises(asyncio.CancelledError if is_cancelled else EngineConnectionLost):
            async with asyncio.timeout(LONG_S / 2):
                await reading

    assert counts == [1]
    assert payloads == [b"0", b"1", b"2", b"3"]


async def test_a_header_is_one_line():
    """Nobody smuggles a second request behind the name of a session."""
    async with asking(BY_LENGTH) as (client, raw):
        with pytest.raises(EngineRejected, match="a header that is not one line"):
            await client.ask(HttpCall("POST", "/x", 30.0, {}, {"x-session-id": "a\r\nx: y"}, request_id="r"))
        assert raw.requests == []


@pytest.mark.parametrize("url", ["https://{}", "http://127.0.0.1:99999", "http://no such host.invalid:1"])
async def test_a_server_that_cannot_be_reached_is_unavailable(url: str):
    """One that speaks no TLS, a port that is none, a name that nobody has."""
    async with asking() as (client, raw):
        other = EngineClient(url.format(client.url.removeprefix("http://")), "sglang")
        other.open()
        try:
            with pytest.raises(EngineUnavailable, match="cannot be reached"):
                await other.ask(GENERATION)
        finally:
            await other.close()
        assert (raw.requests, other.generations_sent) == ([], 0)


async def test_a_process_without_descriptors_does_not_blame_the_server():
    async with asking(BY_LENGTH) as (client, _):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            with pytest.raises(EngineUnavailable, match=f"not the server's fault: .* all its {free} descriptors"):
                await client.ask(GET)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert await client.ask(GET) == (200, BODY)


def test_an_address_that_is_silent_costs_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch):
    """The next one is tried, found first afterwards, and the name is looked up once."""
    looked_up: list[str] = []
    tried: list[str] = []

    class Loop(asyncio.SelectorEventLoop):
        """One whose resolver knows two addresses of a name, of which one is behind a firewall."""

        async def getaddrinfo(self, host, port, **options):
            if host != "engine.test":
                return await super().getaddrinfo(host, port, **options)
            looked_up.append(host)
            return [(2, 1, 6, "", ("192.0.2.1", port)), (2, 1, 6, "", ("127.0.0.1", port))]

        async def sock_connect(self, sock, address):
            tried.append(address[0])
            if address[0] == "192.0.2.1":
                await self.create_future()
            await super().sock_connect(sock, address)

    async def ask() -> list[HttpAnswer]:
        async with asking(BY_LENGTH, BY_LENGTH) as (client, _):
            named = EngineClient(client.url.replace("127.0.0.1", "engine.test"), "sglang")
            named.open()
            try:
                return [await named.ask(HttpCall("POST", "/x", 30.0, {})) for _ in range(2)]
            finally:
                await named.close()

    monkeypatch.setattr("harness.machine.named_address.CONNECT_S", 4.0)
    with asyncio.Runner(loop_factory=Loop) as runner:
        answers = runner.run(ask())

    assert [answer.status for answer in answers] == [200, 200]
    assert (looked_up, tried) == (["engine.test"], ["192.0.2.1", "127.0.0.1", "127.0.0.1"])
