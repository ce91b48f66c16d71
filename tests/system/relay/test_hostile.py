"""An agent in a sandbox that reaches for what is not its own: every attempt is answered 403 and reaches no server."""

import asyncio
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from harness.rollouts.relay.carrier import BEGIN, GREETING, ID_BYTES, KNOWN, RESUME, UNKNOWN
from harness.rollouts.relay.link import DATA
from harness.rollouts.relay.outside import open_relay
from harness.rollouts.relay.request_filter import RequestFilter
from tests.session_servers.scripted import CannedServer, canned_server, http_answer
from tests.session_servers.served import Served, serving
from tests.system.relay.relayed import chat, handle_of, relayed, request, speak
from tests.unit.rollouts.test_relay_link import MALFORMED, frame

OWN, OTHER = "/sessions/" + "a" * 32, "/sessions/" + "b" * 32
CALL = f"{OWN}/v1/chat/completions"
KEY = "authorization: Bearer own"
BODY = chat()

ATTEMPTS = {
    "another session's call": request("POST", f"{OTHER}/v1/chat/completions", body=BODY),
    "another session's call, own key": request("POST", f"{OTHER}/v1/chat/completions", "host: x", KEY, body=BODY),
    "another session's record": request("GET", OTHER),
    "a session whose id begins like its own": request("POST", f"{OWN}0/v1/chat/completions", body=BODY),
    "its own record": request("GET", OWN),
    "its own samples": request("GET", f"{OWN}/samples"),
    "its own facts": request("GET", f"{OWN}/facts"),
    "its own end": request("POST", f"{OWN}/end", body=b"{}"),
    "its own drain": request("POST", f"{OWN}/drain", body=b"{}"),
    "its own deletion": request("DELETE", OWN),
    "all sessions": request("GET", "/sessions"),
    "a new session": request("POST", "/sessions", body=b"{}"),
    "the gate": request("POST", "/sessions/drain", body=b"{}"),
    "the weights": request("POST", "/sessions/weights", body=b"{}"),
    "metrics": request("GET", "/metrics"),
    "a call at the root": request("POST", "/v1/chat/completions", "host: localhost", KEY, body=BODY),
    "dots": request("GET", f"{OWN}/v1/../facts"),
    "dots to another session": request("GET", f"{OWN}/v1/../../{'b' * 32}/facts"),
    "dots in escapes": request("GET", f"{OWN}/v1/%2e%2e/facts"),
    "a slash in escapes": request("GET", f"{OWN}/v1%2f..%2ffacts"),
    "a backslash": request("GET", f"{OWN}/v1\\..\\facts"),
    "an empty part": request("GET", f"/{OWN}/v1/models"),
    "an absolute URL": request("GET", f"http://localhost{OTHER}/v1/models"),
    "an absolute URL of its own": request("GET", f"http://localhost{OWN}/v1/models"),
    "CONNECT": request("CONNECT", "localhost:22"),
    "OPTIONS *": request("OPTIONS", "*"),
    "another host": request("GET", f"{OWN}/v1/models", "host: metadata.internal"),
    "two hosts": request("GET", f"{OWN}/v1/models", "host: localhost", "host: metadata.internal"),
    "no host": request("GET", f"{OWN}/v1/models", "x: y"),
    "a WebSocket": request("GET", f"{OWN}/v1/models", "host: x", "connection: upgrade", "upgrade: websocket"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.0": f"GET {OWN}/v1/models HTTP/1.0\r\nhost: localhost\r\n\r\n".encode(),
    "length and chunks": request("POST", CALL, "host: localhost", "transfer-encoding: chunked", body=b"0\r\n\r\n"),
    "two lengths": request("POST", CALL, "host: localhost", "content-length: 0", body=BODY),
    "unknown encoding": request("POST", CALL, "host: localhost", "transfer-encoding: xchunked"),
    "a folded line": request("POST", CALL, "host: localhost", "x: y", " transfer-encoding: chunked", body=BODY),
    "a space before the colon": request("POST", CALL, "host: localhost", "content-length : 5", body=BODY),
    "a control character": request("GET", f"{OWN}/v1/models", "host: localhost", "x: a\x01b"),
    "a head without end": request("GET", f"{OWN}/v1/models", "host: localhost", *["x: " + "y" * 1000] * 100)[:-2],
    "a line without end": request("GET", f"{OWN}/v1/models", "host: localhost", "x: " + "y" * 100_000)[:-4],
    "a target without end": b"GET /" + b"y" * 100_000,
    "no HTTP": b"hello\r\n\r\n",
}


async def server_and_relay(folder: Path, server: CannedServer, *pieces: bytes) -> bytes:
    """What a relay to the session `OWN` of a server answers."""
    session = Served("a" * 32, f"{server.url}{OWN}", "own")
    async with open_relay(handle_of(session), folder / "relay.sock"):
        return await speak(folder / "relay.sock", *pieces)


@pytest.mark.parametrize("attempt", ATTEMPTS)
async def test_an_attempt_is_answered_403_and_reaches_no_server(tmp_path: Path, attempt: str):
    """One connection each, as plain HTTP."""
    async with canned_server(http_answer(200, {})) as server:
        answer = await server_and_relay(tmp_path, server, ATTEMPTS[attempt])

        assert answer.startswith(b"HTTP/1.1 403 "), answer
        assert b'"code": "not_relayed"' in answer
        assert server.requests == []


SMUGGLED = {
    "another session's": request("GET", f"{OTHER}/facts"),
    "its own": request("GET", f"{OWN}/v1/models"),
    "none": b"nonsense",
}


@pytest.mark.parametrize("attempt", SMUGGLED)
@pytest.mark.parametrize("how", ["length", "chunks"])
async def test_a_second_request_behind_a_call_is_refused_after_its_answer(tmp_path: Path, attempt: str, how: str):
    """However it is smuggled, the server has seen the one call, in a form of the relay's own."""
    chunks = request("POST", CALL, "host: localhost", "transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"
    first = request("POST", CALL, "host: localhost", body=BODY) if how == "length" else chunks
    async with relayed(tmp_path) as (client, session, _, path):
        own = f"/sessions/{session.session_id}".encode()
        answer = await speak(path, (first + SMUGGLED[attempt]).replace(OWN.encode(), own))

        statuses = re.findall(rb"HTTP/1\.1 (\d+) ", answer)
        assert statuses == [b"200" if how == "length" else b"400", b"403"]
        assert len((await client.record(session))["turns"]) == (how == "length")


async def test_what_clients_do_passes(tmp_path: Path):
    """Liveness, models, calls whole and streamed, a body in chunks, kept and closed connections."""
    async with relayed(tmp_path) as (_, session, _, path):
        own, key = f"/sessions/{session.session_id}", f"authorization: Bearer {session.api_key}"
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:9], BODY[9:])) + b"0\r\n\r\n"
        for call in (
            request("HEAD", own, "host: 127.0.0.1:5000", "connection: close"),
            request("GET", f"{own}/", "host: [::1]:5000", "connection: close"),
            request("GET", f"{own}/v1/models", "host: localhost", "connection: close"),
            request("POST", f"{own}/v1/chat/completions", "host: localhost", key, "connection: close", body=BODY),
            request("POST", f"{own}/v1/messages?beta=true", "host: localhost", key,
                    "connection: close", body=chat(max_tokens=20, stream=True)),
            request("POST", f"{own}/v1/chat/completions", "host: localhost", key, "connection: close",
                    "transfer-encoding: chunked") + chunks,
            request("POST", f"{own}/v1/chat/completions", "host: localhost", key,
                    "connection: upgrade, http2-settings, close", "upgrade: h2c", "http2-settings: AAM", body=BODY),
            request("GET", f"{own}/v1/models", "host: localhost", "connection: close", "upgrade: h2c"),
        ):  # fmt: skip
            answer = await speak(path, *(call[at : at + 7] for at in range(0, len(call), 7)))
            assert answer.startswith(b"HTTP/1.1 200 "), (call, answer)

        reader, writer = await asyncio.open_unix_connection(str(path))
        for method in (b"HEAD", b"GET", b"HEAD", b"GET"):
            writer.write(b"%b %b/ HTTP/1.1\r\nhost: localhost\r\n\r\n" % (method, own.encode()))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            assert head.startswith(b"HTTP/1.1 200 ")
            if method == b"GET":
                await asyncio.wait_for(reader.readuntil(b"}"), 30)
        writer.close()


@pytest.mark.parametrize("framing", [b"0\r\nx: ", b"2;x="], ids=["a trailer", "a chunk's extension"])
def test_a_line_of_a_body_without_end_is_refused(framing: bytes):
    """The relay reads no further, however much is sent."""
    head = request("POST", CALL, "host: localhost", "transfer-encoding: chunked")
    calls = RequestFilter(f"http://localhost{OWN}")
    assert calls.feed(head + b"2\r\n{}\r\n" + framing).endswith(b"2\r\n{}\r\n")
    fed = [calls.feed(b"y" * 1000) for _ in range(100)]
    assert (set(fed), "without a body's" in (calls.refusal or "")) == ({b""}, True)


@pytest.mark.parametrize("name", [*MALFORMED, "half a greeting", "no verb", "an unknown link", "half a frame"])
async def test_a_broken_link_disturbs_no_other(tmp_path: Path, name: str):
    """The relay hangs up on it, and the session and its neighbors are served as before."""
    begin = GREETING + BEGIN + os.urandom(ID_BYTES)
    sent = {
        "half a greeting": begin[:10],
        "no verb": GREETING + b"?" + os.urandom(ID_BYTES),
        "an unknown link": GREETING + RESUME + os.urandom(ID_BYTES),
        "half a frame": begin + frame(DATA, 1, 0, b"x" * 100)[:50],
    }.get(name, begin + MALFORMED.get(name, b""))
    async with relayed(tmp_path) as (client, session, _, path):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(sent)
        if name.startswith("half"):
            writer.write_eof()
        with suppress(ConnectionError):
            assert (await asyncio.wait_for(reader.read(), 30))[:1] in {KNOWN, UNKNOWN, b""}
        writer.close()

        neighbor = await client.create()
        assert (await client.chat(neighbor, [{"role": "user", "content": "hi"}])).status_code == 200
        models = request("GET", f"/sessions/{session.session_id}/v1/models", "host: localhost", "connection: close")
        assert (await speak(path, models)).startswith(b"HTTP/1.1 200 ")


async def test_a_thousand_connections_leave_the_server_to_others(tmp_path: Path):
    """More than a sandbox may have are closed at once."""
    async with serving() as client:
        session = await client.create()
        async with open_relay(handle_of(session), tmp_path / "relay.sock"):
            opened = [await asyncio.open_unix_connection(str(tmp_path / "relay.sock")) for _ in range(300)]
            closed = await asyncio.gather(*(asyncio.wait_for(reader.read(), 30) for reader, _ in opened[128:]))
            neighbor = await client.create()
            assert (await client.chat(neighbor, [{"role": "user", "content": "hi"}])).status_code == 200
        for _, writer in opened:
            writer.close()
    assert set(closed) == {b""}


async def test_a_relay_that_is_not_opened_to_the_end_listens_no_more(tmp_path: Path):
    """Cancelled after it began to listen."""
    loop, path, may_go_on = asyncio.get_running_loop(), tmp_path / "relay.sock", threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, may_go_on.wait)  # so the socket's mode cannot be set
    async with AsyncExitStack() as stack:
        relay = open_relay(handle_of(Served("a" * 32, f"http://localhost{OWN}", "own")), path)
        opening = asyncio.create_task(stack.enter_async_context(relay))
        while not path.exists():
            await asyncio.sleep(0.01)
        opening.cancel()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
    await busy
    with pytest.raises(OSError, match=r"No such file|refused"):
        await asyncio.open_unix_connection(str(path))
