"""Byte streams that outlive the connections that carry them. Sans-IO; runs inside and outside: standard library only.

    DATA   stream offset bytes   these bytes stand at the offset; the first of the next stream opens it
    END    stream offset         this direction ends at the offset
    ACK    stream offset         everything before the offset has been taken; an end counts as one byte
    RESET  stream                the sender has broken the stream off, and asks for GONE
    GONE   stream                the sender no longer has the stream
    PING                         the sender is alive

A frame states what is, never what changes, so it may come twice. A sender keeps bytes until they are acknowledged, at
most `WINDOW_BYTES` of a stream; on a new connection it repeats whatever it still keeps, and the receiver skips what it
has. That bounds the memory of both ends, loses nothing and doubles nothing. Only one end opens streams.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

STREAMS = 128
"""Streams that the opening end keeps at one time. The other one allows twice as many: it may learn of an end later."""
WINDOW_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 15
_GONE_WAITING = 4 * STREAMS

DATA, END, ACK, RESET, GONE, PING = range(6)
_HEADER = struct.Struct("!BIQI")  # kind, stream, offset, size of the data


class MalformedFrame(Exception):
    """The other end does not keep to the protocol."""


class LinkStream:
    def __init__(self, link: Link, number: int = 0) -> None:
        self.number = number
        """Id; 0 until the opening end writes."""
        self.on_change: Callable[[], None] = lambda: None
        """Callback for news from the other end."""
        self.is_broken = False
        self.has_ended = False
        """True once this end will write no more."""
        self._link = link
        self._kept = bytearray()  # written and not acknowledged
        self._acknowledged = self._sent = 0  # offsets of `_kept`, and of what the connection has not carried
        self._is_end_sent = self._is_end_acknowledged = False
        self._arrived = bytearray()  # received and not taken
        self._received = self._taken = self._ack_sent = 0
        self._ends_at: int | None = None

    @property
    def room_bytes(self) -> int:
        return WINDOW_BYTES - len(self._kept)

    @property
    def is_taken(self) -> bool:
        """True if the other end has taken everything that was written."""
        return not self._kept and (self._is_end_acknowledged or not self.has_ended)

    @property
    def is_complete(self) -> bool:
        """True if both directions have ended, and both ends know."""
        return self._is_end_acknowledged and self._is_end_taken

    @property
    def _is_end_taken(self) -> bool:
        return self._ends_at is not None and self._taken > self._ends_at

    @property
    def has_news(self) -> bool:
        """True if `take` would return something, or the end."""
        return bool(self._arrived) or self._ends_at is not None

    def write(self, data: bytes) -> None:
        """Send `data`, of at most `room_bytes`."""
        assert len(data) <= self.room_bytes
        if not self.number:
            self._link.number(self)
        self._kept += data
        self._link.mark(self)

    def end(self) -> None:
        """Send the end of this direction. A stream without a byte breaks instead, since it was never opened."""
        self.has_ended = True
        if self.number:
            self._link.mark(self)
        else:
            self.is_broken = True

    def reset(self) -> None:
        """Break the stream off, unless it is complete."""
        if not (self.is_broken or self.is_complete):
            self.is_broken = True
            self._kept.clear()
            self._arrived.clear()
            self._link.mark(self)

    def close(self) -> None:
        """End this direction if the other end has ended its own, else break the stream off."""
        if self._ends_at is None:
            self.reset()
        else:
            self.end()

    def take(self) -> bytes:
        """Return what has arrived, nothing at the end. The other end keeps it until `acknowledge`."""
        data = bytes(self._arrived)
        self._arrived.clear()
        return data

    def acknowledge(self, *, the_end: bool = False) -> None:
        """Report that everything taken so far is done with."""
        taken = self._received - len(self._arrived) + the_end
        if taken > self._taken:
            self._taken = taken
            self._link.mark(self)

    # Called by the link

    def repeat(self) -> None:
        """Send everything again that the other end may not have, on a new connection."""
        self._sent, self._is_end_sent, self._ack_sent = self._acknowledged, False, 0

    def frames(self) -> Iterator[bytes]:
        """Yield what the other end has not been sent, one piece of data at most."""
        if self.is_broken:
            yield _frame(RESET, self.number)
            return
        if self._ack_sent != self._taken:
            self._ack_sent = self._taken
            yield _frame(ACK, self.number, self._taken)
        at = self._sent - self._acknowledged
        data = bytes(self._kept[at : at + _CHUNK_BYTES])
        if data:
            self._sent += len(data)
            yield _frame(DATA, self.number, self._sent - len(data), data)
        if self.has_ended and not self._is_end_sent and not self.has_more:
            self._is_end_sent = True
            yield _frame(END, self.number, self._sent)

    @property
    def has_more(self) -> bool:
        return not self.is_broken and self._sent < self._acknowledged + len(self._kept)

    def receive(self, kind: int, offset: int, data: bytes) -> None:
        """Note a frame. Raises `MalformedFrame`."""
        if kind == ACK:
            self._receive_ack(offset)
            return
        news = data[self._received - offset :] if offset <= self._received else data
        is_early = offset > self._received or (kind == END and offset != self._received)
        self._received += len(news)
        self._arrived += news
        if is_early or (news and self._ends_at is not None) or self._received - self._taken > WINDOW_BYTES:
            raise MalformedFrame(f"expected at most {WINDOW_BYTES} bytes in order, got kind {kind} at {offset}")
        if kind == END:
            self._ends_at = offset

    def _receive_ack(self, offset: int) -> None:
        written = self._acknowledged + len(self._kept)
        if not self._acknowledged <= offset <= written + self.has_ended:
            raise MalformedFrame(f"expected an ACK up to {written}, got {offset}")
        self._is_end_acknowledged = offset > written
        del self._kept[: min(offset, written) - self._acknowledged]
        self._acknowledged = min(offset, written)
        self._sent = max(self._sent, self._acknowledged)

    def forget(self, kind: int) -> None:
        """Note that the other end no longer has the stream: its last ACK may have been lost."""
        self._is_end_acknowledged |= kind == GONE and self.has_ended and self._is_end_taken
        self.is_broken = not self.is_complete


class Link:
    def __init__(self, accept: Callable[[LinkStream], None] | None = None) -> None:
        self._accept = accept  # None at the end that opens
        self._streams: dict[int, LinkStream] = {}
        self._highest = 0
        self._buffer = bytearray()
        self._marked: dict[LinkStream, None] = {}  # those with frames to send, in turn
        self._gone: set[int] = set()
        self._is_ping_due = False

    def number(self, stream: LinkStream) -> None:
        """Give a stream its id; it is the next one that the other end sees."""
        self._highest = stream.number = self._highest + 1
        self._streams[stream.number] = stream

    def mark(self, stream: LinkStream) -> None:
        """Send the stream's frames with the next output."""
        if self._streams.get(stream.number) is stream:
            self._marked[stream] = None

    def ping(self) -> None:
        self._is_ping_due = True

    def restart(self) -> None:
        self._buffer.clear()
        self._gone.clear()
        self._marked = {stream: None for _, stream in sorted(self._streams.items())}
        for stream in self._marked:
            stream.repeat()

    def break_all(self) -> None:
        for stream in list(self._streams.values()):
            stream.reset()
            stream.on_change()

    def output(self) -> bytes:
        """Return the next bytes for the connection, none if there is nothing to say."""
        frames = [_frame(PING)] if self._is_ping_due else []
        frames += [_frame(GONE, number) for number in self._gone]
        self._gone.clear()
        self._is_ping_due = False
        while not frames and self._marked:
            stream = next(iter(self._marked))
            del self._marked[stream]
            frames += stream.frames()
            if stream.has_more:
                self._marked[stream] = None
            if stream.is_complete:
                del self._streams[stream.number]
        return b"".join(frames)

    def receive(self, data: bytes) -> None:
        """Note bytes of the connection. Raises `MalformedFrame`, after which the link is of no use."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            kind, number, offset, size = _HEADER.unpack_from(self._buffer)
            if kind > PING or size > (_CHUNK_BYTES if kind == DATA else 0):
                raise MalformedFrame(f"expected a frame, got kind {kind} with {size} bytes")
            if len(self._buffer) < _HEADER.size + size:
                return
            content = bytes(self._buffer[_HEADER.size : _HEADER.size + size])
            del self._buffer[: _HEADER.size + size]
            if kind != PING:
                self._receive_frame(kind, number, offset, content)

    def _receive_frame(self, kind: int, number: int, offset: int, data: bytes) -> None:
        if number == self._highest + 1 and kind in {DATA, RESET} and self._accept is not None:
            self._highest = number
            if kind == DATA and len(self._streams) < 2 * STREAMS:
                self._streams[number] = LinkStream(self, number)
                self._accept(self._streams[number])
        if not 0 < number <= self._highest:
            raise MalformedFrame(f"expected a stream up to {self._highest}, got {number}")
        stream = self._streams.get(number)
        if kind == RESET or (stream is None and kind in {DATA, END}):
            self._gone.add(number)
            if len(self._gone) > _GONE_WAITING:
                raise MalformedFrame(f"expected at most {_GONE_WAITING} frames of streams that are gone")
        if stream is None:
            return
        if kind in {RESET, GONE}:
            del self._streams[number]
            self._marked.pop(stream, None)
            stream.forget(kind)
        elif not stream.is_broken:
            stream.receive(kind, offset, data)
            if stream.is_complete:
                self.mark(stream)
        stream.on_change()


def _frame(kind: int, number: int = 0, offset: int = 0, data: bytes = b"") -> bytes:
    return _HEADER.pack(kind, number, offset, len(data)) + data
