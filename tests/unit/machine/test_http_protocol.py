"""What whoever reaches the port can make a server keep, with no credential at all."""

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from harness.machine.http_bounds import FRAMING_BYTES
from tests.session_servers.served import says, serving, url_of

LINES = b"a: b\r\n" * 10_000
CHUNKED = b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /health HTTP/1.1\r\n", LINES),
        (b"GET /health HTTP/1.1\r\nA: ", b"x" * 60_000),
        (b"GET /", b"x" * 60_000),
        (CHUNKED, LINES),
    ],
    ids=["many lines", "a long line", "a long path", "lines after the body"],
)
async def test_a_head_without_end_ends_its_connection(begin, more):
    """A few MB at most are taken in, whatever keeps coming."""
    sent_bytes = 0
    async with serving() as client:
        address = urlsplit(client.url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(begin)
        with suppress(ConnectionError):
            while sent_bytes < 64 * FRAMING_BYTES:
                writer.write(more)
                await writer.drain()
                sent_bytes += len(more)
        writer.close()
        alive = await client.http.get("/health")

    assert sent_bytes < 64 * FRAMING_BYTES
    assert alive.status_code == 200


async def test_a_body_is_no_head():
    """Whole or in chunks, a body may be as large as its own limit says, request after request on one connection."""

    async def chunks():
        for _ in range(50):
            yield b"x" * 50_000

    async with serving(*says("hello")) as client:
        url = url_of(await client.create())
        answers = [await client.http.post(url, content=content) for content in (chunks(), b"x" * 2_500_000)]

    assert [answer.json()["error"]["code"] for answer in answers] == ["invalid_request", "invalid_request"]
