"""The server's end of a relay: a unix socket whose connections reach one session, and nothing else.

async with open_relay(session, Path("relay.sock")):
    ...  # the sandbox has the socket, and runs `client_program()`
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit
from zipfile import ZipFile

from msgspec.structs import replace

from harness.errors import CannotListen
from harness.machine.deadlines import ended, read_end, within
from harness.machine.log import get_logger
from harness.rollouts.client.session_server import SessionHandle
from harness.rollouts.relay.carrier import (
    BEGIN,
    GREETING,
    ID_BYTES,
    KNOWN,
    RESUME,
    UNKNOWN,
    ByteStream,
    Carrier,
    SocketStream,
    join,
)
from harness.rollouts.relay.link import MalformedFrame
from harness.rollouts.relay.request_filter import RequestFilter, refusal_answer

_CONNECTIONS = 128
"""Connections of one sandbox, and to the server for it, at one time."""
_LINKS = 4
_GREETING_S = 10.0
_REJOIN_S = 120.0
_CONNECT_S = 30.0
_DISCARD_S = 2.0  # after a refusal: an immediate close would destroy it

_CLIENT = ("__init__.py", "carrier.py", "inside.py", "link.py")

_log = get_logger(__name__)


def client_program() -> bytes:
    """Return the client for the sandbox, one file: `python3 FILE --socket PATH --port PORT -- COMMAND...`."""
    archive = BytesIO()
    with ZipFile(archive, "w") as files:
        for name in _CLIENT:
            files.write(Path(__file__).with_name(name), f"relay/{name}")
        files.writestr("__main__.py", "from relay.inside import main\n\nmain()\n")
    return archive.getvalue()


def seen_from_inside(session: SessionHandle, port: int) -> SessionHandle:
    """Return `session` with its address in a sandbox whose client listens on `port`."""
    path = urlsplit(session.base_url).path
    return replace(session, base_url=f"http://127.0.0.1:{port}{path}")


@asynccontextmanager
async def open_relay(session: SessionHandle, socket: Path, *, mode: int = 0o600) -> AsyncIterator["Relay"]:
    """Listen on `socket` during the block. Raises `CannotListen`, or `OSError` if its mode cannot be set.

    `mode` says who may connect: 0o666 for a sandbox with a user of its own, in a folder that only it can enter.
    """
    relay = Relay(session)
    try:
        server = await asyncio.start_unix_server(relay.carry, socket)
    except OSError as error:
        raise CannotListen(f"expected to listen on {socket}, got {error}; name a short path in a folder") from error
    try:
        await asyncio.to_thread(socket.chmod, mode)
        yield relay
    finally:
        server.close()
        await relay.close()
        await asyncio.to_thread(socket.unlink, missing_ok=True)


@dataclass(slots=True)
class _Held:
    """Link of a sandbox, which waits `_REJOIN_S` for its next connection."""

    carrier: Carrier
    expiry: asyncio.TimerHandle | None = None


class Relay:
    def __init__(self, session: SessionHandle) -> None:
        self._base_url = session.base_url
        self._links: dict[bytes, _Held] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0
        self._calls = asyncio.Semaphore(_CONNECTIONS)  # connections to the server

    async def close(self) -> None:
        for link_id in list(self._links):
            self._forget(link_id)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends: a client's link, or plain HTTP."""
        if self._connections >= _CONNECTIONS:
            writer.transport.abort()
            return
        self._connections += 1
        task = self._start(self._serve_connection(reader, writer))
        try:
            await ended(task)
        finally:
            self._connections -= 1
            task.cancel()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="relay")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(read_end)
        return task

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first = await reader.read(1)
            if first and first == GREETING[:1]:
                await self._carry_link(reader, writer)
            elif first:
                await self._serve(SocketStream(reader, writer, first))
        except (OSError, EOFError, MalformedFrame) as error:
            _log.warning("relay_connection_broken", reason=str(error))
        finally:
            writer.close()

    async def _carry_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_GREETING_S):
            greeting = GREETING[:1] + await reader.readexactly(len(GREETING) + ID_BYTES)
        verb, link_id = greeting[len(GREETING) : -ID_BYTES], greeting[-ID_BYTES:]
        if greeting.startswith(GREETING + BEGIN) and link_id not in self._links and len(self._links) < _LINKS:
            self._links[link_id] = _Held(Carrier(self._accept))
        held = self._links.get(link_id)
        if held is None or verb not in (BEGIN, RESUME):
            writer.write(UNKNOWN)
            return
        writer.write(KNOWN)
        if held.expiry is not None:
            held.expiry.cancel()
        try:
            await held.carrier.carry(reader, writer)
        except MalformedFrame:
            self._forget(link_id)
            raise
        finally:
            if not held.carrier.is_carried:
                held.expiry = asyncio.get_running_loop().call_later(_REJOIN_S, self._forget, link_id)

    def _accept(self, stream: ByteStream) -> None:
        self._start(self._serve(stream))

    def _forget(self, link_id: bytes) -> None:
        held = self._links.pop(link_id, None)
        if held is not None:
            held.carrier.close()

    async def _serve(self, client: ByteStream) -> None:
        calls = _Calls(client, self._base_url)
        try:
            first = await calls.read()
            if first:
                async with self._calls:
                    server = await self._connect()
                    try:
                        await server.write(first)
                    except (OSError, asyncio.CancelledError):
                        server.reset()
                        raise
                    await join(calls, server)
            else:
                client.close()
        except OSError:
            client.reset()
        except asyncio.CancelledError:
            client.reset()
            raise

    async def _connect(self) -> SocketStream:
        parts = urlsplit(self._base_url)
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        async with asyncio.timeout(_CONNECT_S):
            return SocketStream(*await asyncio.open_connection(parts.hostname, port, ssl=is_tls or None))


class _Calls:
    """A client's stream, of which only model calls of the session pass."""

    def __init__(self, client: ByteStream, base_url: str) -> None:
        self._client = client
        self._filter = RequestFilter(base_url)
        self._answered = asyncio.Event()
        self.end, self.close, self.reset = client.end, client.close, client.reset
        self.await_taken = client.await_taken

    async def read(self) -> bytes:
        """See `ByteStream`. Answers a refused request, and is at its end then."""
        while self._filter.refusal is None:
            data = await self._client.read()
            if not data:
                # An answer on its way may meet a client that has left, and the server learns that from a reset only.
                await self._client.await_taken()
                return b""
            if passed := self._filter.feed(data):
                return passed
        while not self._filter.is_answered:
            self._answered.clear()
            await self._answered.wait()
        await self._client.write(refusal_answer(self._filter.refusal))
        self._client.end()
        await self._client.await_taken()
        await within(_DISCARD_S, self._discard())
        return b""

    async def write(self, data: bytes) -> None:
        self._filter.feed_answer(data)
        self._answered.set()
        await self._client.write(data)

    async def _discard(self) -> None:
        while await self._client.read():
            pass
