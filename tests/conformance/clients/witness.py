"""A relay between clients and a session server that counts what passes, whatever the server thinks of it."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from typing import Self
from urllib.parse import urlsplit

_REQUEST = re.compile(rb"(?:GET|HEAD|POST|PUT|DELETE) /sessions/(\w+)\S* HTTP/1\.1\r\n")
_MODEL_CALL = re.compile(rb"POST /sessions/(\w+)/v1(?:beta)?/\S+ HTTP/1\.1\r\n")
_STREAMED = re.compile(rb"HTTP/1\.1 200 .*\r\n(?:.+\r\n)*content-type: text/event-stream")
_CHUNK = 1 << 16


class Witness:
    """Relays connections byte by byte."""

    def __init__(self, server_url: str) -> None:
        address = urlsplit(server_url)
        self._server = (address.hostname, address.port)
        self._relays: set[asyncio.Task[None]] = set()
        self.url = ""
        self.model_calls: Counter[str] = Counter()
        """Model calls seen so far, by session."""
        self.streamed: Counter[str] = Counter()
        """Streamed answers that have begun so far, by session."""

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection; when one side ends, so does the other."""
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        server_reader, server_writer = await asyncio.open_connection(*self._server)
        connection = _Connection(self)
        await asyncio.gather(
            _carry(reader, server_writer, connection.asks), _carry(server_reader, writer, connection.answers)
        )

    async def finished(self) -> None:
        """Every connection has ended."""
        await asyncio.gather(*self._relays)

    @classmethod
    @asynccontextmanager
    async def of(cls, server_url: str) -> AsyncIterator[Self]:
        """A witness in front of the server at `server_url`; every client must have left by the end of the block."""
        witness = cls(server_url)
        async with await asyncio.start_server(witness.relay, "127.0.0.1", 0) as listener:
            witness.url = "http://{}:{}".format(*listener.sockets[0].getsockname())
            yield witness
            await witness.finished()


class _Connection:
    """What passes on one connection; the session is that of its last request."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._session_id = ""

    def asks(self, chunk: bytes) -> None:
        for match in _REQUEST.findall(chunk):
            self._session_id = match.decode()
        self._witness.model_calls.update(call.decode() for call in _MODEL_CALL.findall(chunk))

    def answers(self, chunk: bytes) -> None:
        self._witness.streamed[self._session_id] += len(_STREAMED.findall(chunk))


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Callable[[bytes], None]) -> None:
    """Pass on what comes; when one side ends, so does the other."""
    with suppress(ConnectionError), closing(writer):
        while chunk := await reader.read(_CHUNK):
            note(chunk)
            writer.write(chunk)
            await writer.drain()
