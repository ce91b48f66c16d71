"""What a connection may cost, whoever is at its other end."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from harness.dialects.request_limits import RequestLimits
from harness.engines.scripted import ScriptStep
from harness.errors import ScenarioError
from harness.server.settings import ServerSettings
from tests.builders import body, user
from tests.session_servers.served import PATIENCE_S, eventually, says, serving, session_on, url_of

HI = [user("hi")]
HASTY = ServerSettings(limits=RequestLimits(header_seconds=1, body_seconds=1), write_timeout_s=0.5)
SLOW = ScriptStep(text="x" * 50, token_delay_s=PATIENCE_S)


@asynccontextmanager
async def connection(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """One that takes little at a time."""
    address = urlsplit(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (address.hostname, address.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=4096)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def request(path: str, content: bytes, *lines: str) -> bytes:
    """A whole one."""
    head = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(content)}", *lines, "", ""]
    return "\r\n".join(head).encode() + content


async def last_answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and body of the answer that ends its connection."""
    async with asyncio.timeout(PATIENCE_S):
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


LONG = b"GET /health HTTP/1.1\r\na: " + b"x" * 70_000 + b"\r\n"


@pytest.mark.parametrize(
    ("settings", "sent", "status", "code", "limit"),
    [
        (None, LONG, 431, "headers_too_large", "header_bytes"),
        (None, LONG + b"\r\n", 431, "headers_too_large", "header_bytes"),
        (None, b"GET /" + b"x" * 70_000, 431, "headers_too_large", "header_bytes"),
        (None, b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200, 431, "headers_too_large", "header_lines"),
        (HASTY, b"GET /health HTTP/1.1\r\nhost:", 408, "too_slow", "header_seconds"),
        (HASTY, b"\r\n", 408, "too_slow", "header_seconds"),
        (None, b"\x16\x03\x01 hello", 400, "invalid_request", None),
    ],
)
async def test_a_request_that_no_route_sees_is_answered_in_json_and_counted(settings, sent, status, code, limit):
    """With the error of the dialect, and the end of the connection."""
    async with serving(settings=settings) as client:
        async with connection(client.url) as (reader, writer):
            writer.write(sent)
            answer = await last_answer(reader)
        metrics = (await client.http.get("/metrics")).text

    assert (answer[0], answer[1]["error"]["code"]) == (status, code)
    assert limit is None or f'harness_over_limit_total{{limit="{limit}"}} 1.0' in metrics


async def test_a_connection_without_a_word_ends():
    """It costs a descriptor."""
    async with serving(settings=HASTY) as client, connection(client.url) as (reader, _):
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""


@pytest.mark.parametrize("framing", ["content-length: 100", "transfer-encoding: chunked"])
async def test_a_body_that_does_not_come_is_waited_for_so_long(framing):
    """408 in the form of the dialect; nobody holds a place with half a body."""
    async with session_on(settings=HASTY) as (client, session):
        async with connection(client.url) as (reader, writer):
            writer.write(f"POST {url_of(session)} HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode())
            async with asyncio.timeout(PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                content = json.loads(await reader.readuntil(b"}}"))
                assert await reader.read() == b""
        metrics = (await client.http.get("/metrics")).text

    assert head.startswith(b"HTTP/1.1 408")
    assert content["error"]["code"] == "too_slow"
    assert 'harness_over_limit_total{limit="body_seconds"} 1.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_read_its_answer_has_left(stream):
    """The turn is recorded and not delivered, so its retry is answered from the record."""
    # The answer of 6 MB is more than kernels keep for both ends.
    async with session_on(*says("x" * 20_000, "other"), settings=HASTY) as (client, session):
        content = body(HI, logprobs=True, top_logprobs=5, stream=stream)
        async with connection(client.url) as (_, writer):
            writer.transport.pause_reading()
            writer.write(request(url_of(session), content))
            async with asyncio.timeout(PATIENCE_S):
                while 'limit="write_timeout"} 1.0' not in (await client.http.get("/metrics")).text:
                    await asyncio.sleep(0.05)
        (turn,) = (await client.record(session))["turns"]
        retried = await client.http.post(url_of(session), content=content)
        turns = (await client.record(session))["turns"]

    assert (turn["status"], turn["delivered"], retried.status_code, len(turns)) == ("completed", False, 200, 1)


async def test_requests_do_not_overlap_and_a_client_that_sends_them_is_noticed_when_it_leaves():
    """A second request, or anything else behind the first, hides nobody's end."""
    async with session_on(SLOW, *says("hello")) as (client, session):
        for behind in (request(url_of(session), body([user("more")])), b"nonsense" * 20_000):
            async with connection(client.url) as (_, writer):
                writer.write(request(url_of(session), body(HI)) + behind)
                await client.turns_in_flight(1)
            await eventually(lambda: not client.engine.live)
        record = await client.record(session)

    assert [turn["end"] for turn in record["turns"]] == ["client_left"]


async def test_an_answer_comes_whole_whatever_is_sent_behind_its_request():
    """No other answer is written into it; the connection ends with it."""
    async with session_on(*says("hello")) as (client, session), connection(client.url) as (reader, writer):
        writer.write(request(url_of(session), body(HI)) + b"nonsense\r\n\r\n")
        status, answer = await last_answer(reader)

    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello")


@pytest.mark.parametrize("name", ["body_bytes", "calls", "json_depth", "header_seconds", "sessions", "connections"])
@pytest.mark.parametrize("number", [0, -1, float("nan"), 1.5, True, 10**18])
def test_a_limit_that_cannot_be_meant_is_refused_by_its_name(name, number):
    """At the start, not at the first request."""
    with pytest.raises(ScenarioError, match=name):
        ServerSettings(limits=replace(RequestLimits(), **{name: number})).check()


@pytest.mark.parametrize("name", ["write_timeout_s", "pause_timeout_s", "drain_grace_s", "idle_ttl_s"])
@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e18])
def test_a_time_that_cannot_be_meant_is_refused_by_its_name(name, seconds):
    """Likewise."""
    with pytest.raises(ScenarioError, match=name):
        ServerSettings(**{name: seconds}).check()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_has_so_many_calls_at_one_time(stream):
    """429 with `retry-after`, for this session and no other; a call that ends makes room, streamed or not."""
    settings = ServerSettings(limits=RequestLimits(calls=2, calls_bytes=1_000))
    async with serving(SLOW, SLOW, *says("hello"), settings=settings) as client:
        session, other = await client.create(), await client.create()
        waiting = [asyncio.create_task(client.chat(session, [user(text)], stream=stream)) for text in ("a", "b")]
        await eventually(lambda: len(client.engine.live) == 2)
        refused = await client.chat(session, HI, stream=stream)
        large = await client.chat(other, [user("x" * 1_000)])
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        async with asyncio.timeout(PATIENCE_S):
            while (served := await client.chat(session, HI)).status_code == 429:
                await asyncio.sleep(0.02)
        metrics = (await client.http.get("/metrics")).text

    assert [(each.status_code, each.json()["error"]["code"]) for each in (refused, large)] == [(429, "too_many")] * 2
    assert (refused.headers["retry-after"], served.status_code) == ("1", 200)
    assert all(f'harness_over_limit_total{{limit="{limit}"}}' in metrics for limit in ("calls", "calls_bytes"))


async def test_a_server_holds_so_many_sessions():
    """429; one that is deleted makes room."""
    async with session_on(settings=ServerSettings(limits=RequestLimits(sessions=1))) as (client, session):
        refused = await client.http.post("/sessions")
        await client.http.delete(f"/sessions/{session.session_id}")
        await client.create()

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many")


async def test_a_server_has_so_many_connections():
    """One more is reset and counted where none is idle; one that ends makes room."""
    async with serving(settings=ServerSettings(limits=RequestLimits(connections=2))) as client:
        async with connection(client.url) as (_, one), connection(client.url) as (_, other):
            for writer in (one, other):
                writer.write(b"GET /health HTTP/1.1\r\n")
            async with asyncio.timeout(PATIENCE_S):
                while await is_served(client.url):
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(PATIENCE_S):
            while not await is_served(client.url):
                await asyncio.sleep(0.01)
        metrics = (await client.http.get("/metrics")).text

    assert 'harness_over_limit_total{limit="connections"}' in metrics


async def is_served(url: str) -> bool:
    """Whether a connection gets an answer."""
    with suppress(ConnectionError):
        async with connection(url) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            return bool(await reader.read(1))
    return False
