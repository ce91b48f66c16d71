"""Byte streams between two programs, and a link that carries them. Runs inside and outside: standard library only.

The end of a stream, a reset and back-pressure pass through: each end learns what it would learn on a direct connection.
That is how a session server knows whether an answer was read.

A link has one connection after the other. Both ends send a PING every 20 s, so that no proxy between them sees an idle
connection, and give up one that has been silent for 60 s. The streams stay.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Protocol

from .link import Link, LinkStream

GREETING = b"\0relay1 "
"""First bytes of a connection that carries a link; then `BEGIN` or `RESUME`, and the link's id."""
BEGIN, RESUME = b"b", b"r"
ID_BYTES = 16
KNOWN, UNKNOWN = b"k", b"u"
PING_S = 20.0
SILENCES = 3
"""Pings without an answer, before a connection is given up."""
LINGER_S = 10.0
"""Time for a client to close after the end of its server: an immediate close would destroy the answer."""

_READ_BYTES = 1 << 16
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
        return first or await self._reader.read(_READ_BYTES)

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


class Carrier:
    """Link, and the connection that carries it now."""

    def __init__(self, accept: Callable[[CarriedStream], None] | None = None, ping_s: float = PING_S) -> None:
        self.link = Link(None if accept is None else lambda stream: accept(CarriedStream(self, stream)))
        self._ping_s = ping_s
        self._writer: asyncio.StreamWriter | None = None
        self._unanswered = 0  # pings; by the clock, a machine that slept would give up a connection that works
        self._is_blocked = asyncio.Event()

    @property
    def is_carried(self) -> bool:
        return self._writer is not None

    def open(self) -> CarriedStream:
        """Open a stream, which the other end sees with its first bytes."""
        return CarriedStream(self, LinkStream(self.link))

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry the link over this connection until it ends, or another one takes over. Raises `MalformedFrame`."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._writer, self._unanswered = writer, 0
        self.link.restart()
        beside = [asyncio.ensure_future(self._ping(writer)), asyncio.ensure_future(self._drain(writer))]
        try:
            self.flush()
            while True:
                data = await reader.read(_READ_BYTES)
                if not data or self._writer is not writer:
                    return
                self._unanswered = 0
                self.link.receive(data)
                self.flush()
        except (OSError, EOFError):
            return
        finally:
            if self._writer is writer:
                self._writer = None
            writer.transport.abort()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    def close(self) -> None:
        self.link.break_all()
        self.flush()

    def flush(self) -> None:
        """Send what the link has to say, as far as the connection takes it."""
        transport = None if self._writer is None else self._writer.transport
        while transport is not None and not transport.is_closing():
            if transport.get_write_buffer_size() > _READ_BYTES:
                self._is_blocked.set()
                return
            data = self.link.output()
            if not data:
                return
            transport.write(data)

    async def _ping(self, writer: asyncio.StreamWriter) -> None:
        while self._unanswered < SILENCES:
            self._unanswered += 1
            self.link.ping()
            self.flush()
            await asyncio.sleep(self._ping_s)
        writer.transport.abort()

    async def _drain(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await self._is_blocked.wait()
            self._is_blocked.clear()
            await writer.drain()
            self.flush()


class CarriedStream:
    """Stream of a link, as a `ByteStream`."""

    def __init__(self, carrier: Carrier, stream: LinkStream) -> None:
        self._carrier = carrier
        self._stream = stream
        self._changed = asyncio.Event()
        stream.on_change = self._changed.set

    async def read(self) -> bytes:
        self._stream.acknowledge()
        self._carrier.flush()
        await self._until(lambda: self._stream.has_news)
        data = self._stream.take()
        if not data:
            self._stream.acknowledge(the_end=True)
            self._carrier.flush()
        return data

    async def write(self, data: bytes) -> None:
        while data:
            await self._until(lambda: self._stream.room_bytes > 0)
            room_bytes = self._stream.room_bytes
            self._stream.write(data[:room_bytes])
            data = data[room_bytes:]
            self._carrier.flush()

    def end(self) -> None:
        self._stream.end()
        self._carrier.flush()

    async def await_taken(self) -> None:
        await self._until(lambda: self._stream.is_taken)

    def close(self) -> None:
        self._stream.close()
        self._carrier.flush()

    def reset(self) -> None:
        self._stream.reset()
        self._changed.set()
        self._carrier.flush()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds() or self._stream.is_broken:
            if self._stream.is_broken:
                raise ConnectionResetError("the other end of the relay broke the stream off")
            self._changed.clear()
            await self._changed.wait()
