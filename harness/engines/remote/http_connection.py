"""HTTP/1.1 connections to one engine server, kept alive, with one exchange at a time each.

Supports only what engines need: no redirects, cookies, compression or proxies. A general client costs a third of a
millisecond more per request (`docs/scaling.md`).

Failures are `OSError`s: `CannotConnect` before anything was sent, `ConnectionResetError` afterwards, `AnswerInvalid`
for what is not HTTP. Deadlines belong to the caller, except for connecting. Leaving an answer early closes its
connection.
"""

import asyncio
import errno
import math
from collections.abc import Sequence
from typing import cast

from harness.machine.named_address import CONNECT_S, NamedAddress
from harness.machine.this_process import descriptor_limit

_CLOSE_S = 2.0
_KEEP_ALIVE_S = 4.0  # uvicorn closes idle connections after 5 s; a request on a closing connection would be lost
_MOST_HEAD_BYTES = 256 << 10
_MOST_UNREAD_BYTES = 1 << 20
_MOST_BODY_BYTES = 4 << 30
_FINAL = 200  # answers of a lower status announce another one


class CannotConnect(OSError):
    """Raised if the server saw nothing of the request."""


class StaleConnection(ConnectionResetError):
    """Raised if a kept connection closed before any byte of an answer."""


class AnswerInvalid(OSError):
    """Raised if the answer is not HTTP or exceeds a limit."""


class EngineConnection(asyncio.Protocol):
    def __init__(self) -> None:
        # A trainer imports this module and may connect to nothing.
        from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.idle_since = 0.0
        """Loop time when its last exchange ended."""
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._refusals = (HttpParserError, HttpParserUpgrade, AnswerInvalid)
        self._exchanges = 0
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        """Status; 0 before it is known."""
        self.retry_after = b""
        self.is_whole = False
        self._stays_open = False
        self._says_its_end = False
        self._head_bytes = 0
        # Bytes gather here until read, so a reader of the whole wakes once; beyond a limit the server waits.
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self._is_held_up = False
        self._failure: OSError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._gather_s = 0.0
        self._gathering: asyncio.TimerHandle | None = None
        self._is_gathered = False

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        assert self._transport is not None
        self._begin()
        self._exchanges += 1
        if self.closed.done():
            self._fail(None)
        else:
            self._transport.writelines(parts)

    @property
    def is_reusable(self) -> bool:
        return self.is_whole and self._stays_open and not self.closed.done() and self._failure is None

    async def read_some(self) -> bytes:
        """Read what arrived since the last read, or wait; empty at the end."""
        return await self.gather(0.0)

    async def read_all(self) -> bytes:
        content = await self.gather(math.inf)
        if self.is_whole and not self._pieces:
            return content
        pieces, size = [content], len(content)
        while piece := await self.gather(math.inf):
            pieces.append(piece)
            size += len(piece)
            if size > _MOST_BODY_BYTES:
                raise AnswerInvalid(f"a body of more than {_MOST_BODY_BYTES} bytes")
        return b"".join(pieces)

    async def gather(self, seconds: float) -> bytes:
        """Read until `seconds` after the next piece, a megabyte, or the end. Never raises: `take` does."""
        self._gather_s, self._is_gathered = seconds, not seconds
        try:
            while not self._is_readable():
                self._waiter = self._loop.create_future()
                self._wake()
                await self._waiter
        finally:
            if self._gathering is not None:
                self._gathering.cancel()
                self._gathering = None
        if self._failure is not None and (seconds or not self._pieces):
            raise self._failure
        return self.take()

    def take(self) -> bytes:
        """Return the unread bytes without waiting."""
        content = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._unread_bytes = 0
        is_held_up, self._is_held_up = self._is_held_up, False
        if is_held_up and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        return content

    def _is_readable(self) -> bool:
        if self.is_whole or self._is_held_up or self._failure is not None:
            return True
        return bool(self._pieces) and self._is_gathered

    def _wake(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if self._is_readable():
            self._waiter.set_result(None)
        elif self._pieces and self._gathering is None and self._gather_s < math.inf:
            self._gathering = self._loop.call_later(self._gather_s, self._end_gathering)

    def _end_gathering(self) -> None:
        self._is_gathered = True
        self._wake()

    def _fail(self, cause: Exception | None) -> None:
        if self.is_whole or self._failure is not None:
            return
        # An answer of unstated length ends with the connection. Without any byte on a kept connection, the server had
        # closed it before this request.
        if self.status and not self._says_its_end and cause is None:
            self.is_whole = True
        elif self._exchanges > 1 and not self.status and not self._head_bytes:
            self._failure = StaleConnection("the server had closed the connection")
        else:
            self._failure = ConnectionResetError(str(cause or "the server closed the connection"))
        self._wake()

    def abort(self) -> None:
        """Close the connection at once. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is of no such class

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            self._parser.feed_data(data)
            if not self.status:
                self._head_bytes += len(data)
                if self._head_bytes > _MOST_HEAD_BYTES:
                    raise AnswerInvalid(f"headers of more than {_MOST_HEAD_BYTES} bytes")
        except self._refusals as error:
            self._failure = self._failure or AnswerInvalid(f"{type(error).__name__} {error}")
            self._transport.abort()
        if self._unread_bytes > _MOST_UNREAD_BYTES and not self.is_whole:
            self._is_held_up = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc)
        self.closed.set_result(None)

    # What the parser calls

    def on_message_begin(self) -> None:
        if self.is_whole:
            raise AnswerInvalid("a second answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Record whether the length is stated, and when to retry."""
        match name.lower():
            case b"content-length" | b"transfer-encoding":
                self._says_its_end = True
            case b"retry-after":
                self.retry_after = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self.status = status if status >= _FINAL else 0

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._unread_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.status:
            self.is_whole, self._stays_open = True, self._parser.should_keep_alive()


class EngineConnections:
    """Connections to the server at `url`, whose path is ignored: one per concurrent request."""

    def __init__(self, url: str) -> None:
        self._address = NamedAddress(url)
        self._open: set[EngineConnection] = set()
        self._idle: list[EngineConnection] = []
        """Most recently used last, and used first."""
        self._sweep: asyncio.TimerHandle | None = None

    async def begin(self, parts: Sequence[bytes | memoryview], *, on_new: bool = False) -> EngineConnection:
        """Send a request, on an unused connection if `on_new`. Raises `CannotConnect`. After the answer, call `end`."""
        connection = None if on_new else self._choose_kept()
        if connection is None:
            connection = await self._connect()
        connection.send(parts)
        return connection

    def end(self, connection: EngineConnection) -> None:
        """Keep the connection if it is reusable, else close it."""
        if connection.is_reusable and connection in self._open:
            self._keep(connection)
        else:
            self._drop(connection)

    async def close(self) -> None:
        """Close every connection, busy ones too. Idempotent."""
        if self._sweep is not None:
            self._sweep.cancel()
        closing = list(self._open)
        for connection in closing:
            self._drop(connection)
        if closing:
            await asyncio.wait([connection.closed for connection in closing], timeout=_CLOSE_S)

    async def _connect(self) -> EngineConnection:
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await self._address.connect(EngineConnection)
        except TimeoutError as error:
            raise CannotConnect(f"no connection within {CONNECT_S:g} s; is the server running?") from error
        except (OSError, ValueError) as error:  # of a name or a port that is none, too
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise CannotConnect(
                    f"not the server's fault: this process has all its {descriptor_limit()} descriptors open; raise"
                    " `ulimit -n`, or lower the limit `connections`"
                ) from error
            raise CannotConnect(f"{error}; is the server running?") from error
        self._open.add(connection)
        return connection

    def _choose_kept(self) -> EngineConnection | None:
        oldest = asyncio.get_running_loop().time() - _KEEP_ALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and connection.idle_since > oldest:
                return connection
            self._drop(connection)
        return None

    def _keep(self, connection: EngineConnection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(_KEEP_ALIVE_S, self._drop_idle)

    def _drop(self, connection: EngineConnection) -> None:
        self._open.discard(connection)
        connection.abort()

    def _drop_idle(self) -> None:
        loop = asyncio.get_running_loop()
        while self._idle and self._idle[0].idle_since <= loop.time() - _KEEP_ALIVE_S:
            self._drop(self._idle.pop(0))
        self._sweep = loop.call_later(_KEEP_ALIVE_S, self._drop_idle) if self._idle else None
