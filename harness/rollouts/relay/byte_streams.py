"""Byte streams between two programs, and what joins two of them. Runs inside and outside: standard library only.

The end of a stream, a reset and back-pressure pass through: each end learns what it would learn on a direct connection.
That is how a session server knows whether an answer was read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Protocol

LINGER_S = 10.0
"""Time for a client to close after the end of its server: an immediate close would destroy the answer."""

_CHUNK_BYTES = 1 << 16
_NO_FAREWELL = struct.pack("ii", 1, 0)  # close with a reset, discarding unsent and unread bytes


class ByteStream(Protocol):
    """Both directions of a connection. All methods raise `ConnectionError` after a reset."""

    async def read(self) -> bytes:
        """Return the next bytes, or none at the end. What was returned before is done with."""

    async def write(self, data: bytes) -> None:
        """Send `data`; wait while the other end does not read."""

    def end(self) -> None:
        """Send the end of this direction."""

    async def await_taken(self) -> None:
        """Wait until the other end has taken what was written, where a stream can tell."""

    def close(self) -> None:
        """End what has not ended, after what was written has been sent."""

    def reset(self) -> None:
        """Break both directions off."""


class SocketStream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes = b"") -> None:
        self._reader = reader
        self._writer = writer
        self._first = first  # has been read already

    async def read(self) -> bytes:
        first, self._first = self._first, b""
        return first or await self._reader.read(_CHUNK_BYTES)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def end(self) -> None:
        if not self._writer.can_write_eof():  # TLS
            self._writer.close()
        elif not self._writer.is_closing():
            self._writer.write_eof()

    async def await_taken(self) -> None:
        """See `ByteStream`."""

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        sock = self._writer.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0 and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_FAREWELL)
        self._writer.transport.abort()


async def join(client: ByteStream, server: ByteStream) -> None:
    """Carry bytes both ways until the server ends. If a stream breaks, or this is cancelled, reset both.

    An answer to a client that has ended its direction breaks both, as the client's kernel would: it is not read.
    """
    has_left = False

    async def ask() -> None:
        nonlocal has_left
        while data := await client.read():
            await server.write(data)
        has_left = True
        server.end()

    async def answer() -> None:
        while data := await server.read():
            if has_left:
                raise ConnectionResetError
            await client.write(data)
        client.end()
        await client.await_taken()

    asking, answering = asyncio.ensure_future(ask()), asyncio.ensure_future(answer())
    try:
        await asyncio.wait([asking, answering], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done() and not asking.exception():
            await asyncio.wait([answering])
        elif not asking.done() and not answering.exception():
            await asyncio.wait([asking], timeout=LINGER_S)  # the client closes when it has read the end
    finally:
        is_whole = answering.done() and not answering.cancelled() and answering.exception() is None
        for stream in (client, server):
            stream.close() if is_whole else stream.reset()
        asking.cancel()
        answering.cancel()
        await asyncio.gather(asking, answering, return_exceptions=True)
