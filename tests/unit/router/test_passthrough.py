"""What is the gateway's passes untouched: bytes, streams in both directions, and a client that leaves."""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from starlette.types import Receive, Scope, Send

from server_patch.router.app import open_http
from server_patch.router.passthrough import Passthrough
from tests.fake_engines.workers import serving_app

ODD_BYTES = bytes(range(256)) * 300


@dataclass
class Upstream:
    """A gateway that keeps what it was sent and answers what it is told."""

    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=lambda: [b"ok"])
    scope: Scope = field(default_factory=dict)
    body: bytes = b""
    first_bytes: asyncio.Event = field(default_factory=asyncio.Event)
    next_chunk: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    breaks: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        more = True
        while more:
            message = await receive()
            self.body += message["body"]
            self.first_bytes.set()
            more = message["more_body"]
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for number, chunk in enumerate(self.chunks):
            if number:
                await self.released_or_left(receive)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if not self.breaks:
            await send({"type": "http.response.body"})

    async def released_or_left(self, receive: Receive) -> None:
        leaving = asyncio.ensure_future(receive())
        going_on = asyncio.ensure_future(self.next_chunk.wait())
        await asyncio.wait((leaving, going_on), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.left.set()
        for task in (leaving, going_on):
            task.cancel()


@asynccontextmanager
async def passing(upstream: Upstream) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A client, and the address of a passthrough in front of `upstream`."""
    async with (
        serving_app(upstream) as gateway,
        open_http() as http,
        serving_app(Passthrough(http, gateway, is_guarded=bool)) as url,
        aiohttp.ClientSession(auto_decompress=False) as client,
    ):
        yield client, url


def sent_headers(upstream: Upstream) -> dict[bytes, bytes]:
    return dict(upstream.scope["headers"])


async def test_method_path_query_headers_and_body_arrive_as_they_were_sent():
    """Escapes stay escapes, unknown headers travel, no byte of the body changes, nothing is added."""
    upstream = Upstream()
    async with passing(upstream) as (_, url):
        host = url.removeprefix("http://")
        reader, writer = await asyncio.open_connection(*host.split(":"))
        head = (
            f"PATCH /a%2Fb/%C3%A9?x=%20&y=1&&z HTTP/1.1\r\nHost: {host}\r\nX-Custom: 1\r\nX-SMG-Routing-Key: k\r\n"
            f"Authorization: Bearer t\r\nContent-Length: {len(ODD_BYTES)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + ODD_BYTES)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()

    assert answer.startswith(b"HTTP/1.1 200")
    scope = upstream.scope
    assert (scope["method"], scope["raw_path"], scope["query_string"]) == ("PATCH", b"/a%2Fb/%C3%A9", b"x=%20&y=1&&z")
    assert upstream.body == ODD_BYTES
    kept = {b"x-custom": b"1", b"x-smg-routing-key": b"k", b"authorization": b"Bearer t"}
    assert {
        name: value for name, value in sent_headers(upstream).items() if name not in (b"host", b"content-length")
    } == kept


async def test_status_headers_and_bytes_come_back_as_they_are():
    """An error is not replaced, a repeated header not folded, a compressed body not opened."""
    packed = gzip.compress(b"x" * 1000)
    headers = [
        (b"content-encoding", b"gzip"),
        (b"x-smg-error-code", b"e"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
    ]
    async with (
        passing(Upstream(status=418, headers=headers, chunks=[packed])) as (client, url),
        client.get(f"{url}/generate") as answer,
    ):
        assert (answer.status, await answer.read()) == (418, packed)
        assert answer.headers.getall("set-cookie") == ["a=1", "b=2"]
        assert (answer.headers["x-smg-error-code"], answer.headers["content-encoding"]) == ("e", "gzip")


async def test_a_redirect_is_the_client_s_to_follow():
    """It names the gateway's own path, which is right for the router too."""
    async with (
        passing(Upstream(status=307, headers=[(b"location", b"/there")])) as (client, url),
        client.get(f"{url}/here", allow_redirects=False) as answer,
    ):
        assert (answer.status, answer.headers["location"]) == (307, "/there")


async def test_an_event_arrives_when_it_is_sent():
    """The second one does not exist yet when the first is read."""
    upstream = Upstream(headers=[(b"content-type", b"text/event-stream")], chunks=[b"data: 1\n\n", b"data: 2\n\n"])
    async with passing(upstream) as (client, url), client.post(f"{url}/generate", data=b"{}") as answer:
        assert await answer.content.readany() == b"data: 1\n\n"
        upstream.next_chunk.set()
        assert await answer.content.read() == b"data: 2\n\n"


async def test_a_body_is_passed_on_while_it_comes():
    """The gateway has the beginning before the client has sent the end."""
    upstream = Upstream()

    async def body() -> AsyncIterator[bytes]:
        yield b"beginning "
        await upstream.first_bytes.wait()
        yield b"end"

    async with passing(upstream) as (client, url), client.post(f"{url}/generate", data=body()) as answer:
        assert answer.status == 200

    assert upstream.body == b"beginning end"


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_client_that_leaves_takes_its_request_out_of_the_gateway(method):
    upstream = Upstream(chunks=[b"first", b"never sent"])
    async with (
        passing(upstream) as (client, url),
        client.request(method, f"{url}/generate", data=b"{}" if method == "POST" else None) as answer,
    ):
        await answer.content.readany()
        answer.close()
        async with asyncio.timeout(30):
            await upstream.left.wait()


async def test_an_answer_that_breaks_off_is_not_made_whole():
    """The client sees a broken answer, as it would have seen it from the gateway."""
    async with (
        passing(Upstream(chunks=[b"half"], breaks=True)) as (client, url),
        client.get(f"{url}/generate") as answer,
    ):
        assert await answer.content.readany() == b"half"
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()


async def test_a_gateway_that_is_gone_is_a_502_that_says_so():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        async with (
            open_http() as http,
            serving_app(Passthrough(http, gone, is_guarded=bool)) as url,
            aiohttp.ClientSession() as client,
            client.post(f"{url}/generate", data=b"{}") as answer,
        ):
            error = json.loads(await answer.read())["error"]

    assert (answer.status, error["code"]) == (502, "gateway_unreachable")
    assert gone in error["message"]
