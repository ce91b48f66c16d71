"""The server's end of a relay: a unix socket whose connections reach one session, and nothing else.

async with open_relay(session, Path("relay.sock")):
    ...  # the sandbox has the socket, and runs `client_program()`
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit
from zipfile import ZipFile

from msgspec.structs import replace

from harness.errors import CannotListen
from harness.machine.deadlines import ended, read_end, to_the_end, within
from harness.rollouts.client.session_server import SessionHandle
from harness.rollouts.relay.byte_streams import ByteStream, SocketStream
from harness.rollouts.relay.request_filter import RequestFilter, refusal_answer

_CONNECTIONS = 128  # from one sandbox, at one time
_CONNECT_S = 30.0
_LINGER_S = 2.0  # time to discard input after a refusal: an immediate close would destroy it

_CLIENT = ("__init__.py", "byte_streams.py", "inside.py")


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
    """Listen on `socket` during the block. Raises `CannotListen`.

    `mode` says who may connect: 0o666 for a sandbox with a user of its own, in a folder that only it can enter.
    """
    relay = Relay(session)
    try:
        server = await asyncio.start_unix_server(relay.carry, socket)
        await asyncio.to_thread(socket.chmod, mode)
    except OSError as error:
        raise CannotListen(f"expected to listen on {socket}, got {error}; name a short path in a folder") from error
    try:
        yield relay
    finally:
        server.close()
        await relay.close()
        await asyncio.to_thread(socket.unlink, missing_ok=True)


class Relay:
    """Connections of one sandbox."""

    def __init__(self, session: SessionHandle) -> None:
        self._base_url = session.base_url
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Break off every connection."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        if len(self._tasks) >= _CONNECTIONS:
            writer.transport.abort()
            return
        task = self._start(self._serve(SocketStream(reader, writer)))
        try:
            await ended(task)
        finally:
            task.cancel()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="relay")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(read_end)
        return task

    async def _serve(self, client: ByteStream) -> None:
        calls = RequestFilter(self._base_url)
        try:
            onward = b""
            while not onward and calls.refusal is None:
                data = await client.read()
                if not data:
                    client.close()
                    return
                onward = calls.feed(data)
            if onward:
                await self._exchange(client, calls, onward)
            if calls.refusal is not None:
                await client.write(refusal_answer(calls.refusal))
            client.end()
            await client.await_taken()
            await within(_LINGER_S, _discard(client))
            client.close()
        except OSError:
            client.reset()
        except asyncio.CancelledError:
            client.reset()
            raise

    async def _exchange(self, client: ByteStream, calls: RequestFilter, onward: bytes) -> None:
        """Forward requests and answers until the server closes, or the answer before a refusal has passed."""
        server = await self._connect()
        asking = asyncio.create_task(_ask(client, server, calls, onward))
        answering = asyncio.create_task(_answer(client, server, calls))
        is_whole = False
        try:
            await asyncio.wait((asking, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                asking.result()
                if calls.refusal is None or not calls.is_answered:
                    await ended(answering)
            if answering.done():
                answering.result()
            is_whole = True
        finally:
            for task in (asking, answering):
                task.cancel()
                await to_the_end(ended(task))
                read_end(task)
            server.close() if is_whole else server.reset()

    async def _connect(self) -> SocketStream:
        parts = urlsplit(self._base_url)
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        async with asyncio.timeout(_CONNECT_S):
            return SocketStream(*await asyncio.open_connection(parts.hostname, port, ssl=is_tls or None))


async def _ask(client: ByteStream, server: ByteStream, calls: RequestFilter, onward: bytes) -> None:
    while True:
        await server.write(onward)
        if calls.refusal is not None:
            return
        data = await client.read()
        if not data:
            # An answer on its way may meet a client that has left, and the server learns that from a reset only.
            await client.await_taken()
            server.end()
            return
        onward = calls.feed(data)


async def _answer(client: ByteStream, server: ByteStream, calls: RequestFilter) -> None:
    while data := await server.read():
        calls.feed_answer(data)
        await client.write(data)
        if calls.refusal is not None and calls.is_answered:
            return


async def _discard(client: ByteStream) -> None:
    while await client.read():
        pass
