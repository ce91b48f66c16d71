"""A link over one connection after the other. Runs inside and outside: standard library only.

Both ends send a PING every 20 s, so that no proxy between them sees an idle connection, and give up one that has been
silent for 60 s. The streams stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .link import Link, LinkStream

GREETING = b"\0relay1 "
"""First bytes of a connection that carries a link; then `BEGIN` or `RESUME`, and the link's id."""
BEGIN, RESUME = b"b", b"r"
ID_BYTES = 16
KNOWN, UNKNOWN = b"k", b"u"
PING_S = 20.0
SILENCES = 3
"""Pings without an answer, before a connection is given up."""

_READ_BYTES = 1 << 16


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
