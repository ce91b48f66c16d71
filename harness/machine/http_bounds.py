"""HTTP connections with bounded cost and duration.

Any client that reaches the port costs a connection before it shows a credential. uvicorn accepts any number of header
lines, at any pace, and holds an unread answer forever. Here

- connections are counted, to leave descriptors for engines and the store; idle ones make room first;
- header lines and chunk framing are counted and bounded;
- head and body must arrive in time; the rest is discarded for a moment only;
- an answer must be read in time, or the connection is reset;
- a request before the last answer is not read, and ends the connection after that answer;
- an offer of another protocol is declined and the request served.

One periodic check covers all connections. The reader bounds a whole body (`server.wire.read_body`); here only a stalled
one ends.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from socket import SO_LINGER, SOL_SOCKET
from struct import pack

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from harness.errors import HeadersTooLarge, MalformedRequest, RequestError, TooMany, TooSlow

FRAMING_BYTES = 1 << 20
"""Limit of a request's head and framing."""

_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)  # uvicorn warns of each malformed request, which its answer already counts

_LOOK_EVERY_S = 1.0
_LINGER_S = 2.0  # time to discard input after an answer: an immediate close would destroy the answer
_STEP_BYTES = 1 << 16  # bytes of an answer, or all that is left, that a client must take to count as reading

_REFUSED = (None, b"websocket")  # CONNECT, and requests that make sense only in the other protocol
_NO_FAREWELL = pack("ii", 1, 0)  # close with a reset, discarding unsent and unread bytes


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    connections: int
    """Open at once. The next is reset, unless an idle one can be closed."""
    header_bytes: int
    """First line and header lines together."""
    header_lines: int
    header_s: float
    """Time for the head, from its first byte."""
    body_s: float
    """Time without progress of a body being read."""
    write_s: float
    """Time without progress of the client's reading."""


class ServerConnections(ServerState):
    """Connections of one server, within bounds."""

    are_reset = False

    def __init__(self, bounds: ConnectionBounds, answer: Callable[[RequestError], Response]) -> None:
        super().__init__()
        self.bounds = bounds
        self.answer = answer
        """Function that answers, and counts, requests that no application sees."""
        self.idle: dict[BoundedProtocol, None] = {}
        """Connections between requests, longest idle first."""

    async def watch_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        shortest_s = min(self.bounds.header_s, self.bounds.body_s, self.bounds.write_s)
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, shortest_s / 4))
            for connection in list(self.connections):
                if isinstance(connection, BoundedProtocol):
                    connection.look(loop.time())

    def close_idle(self) -> bool:
        """Close the longest idle connection with its whole answer. Return False if none."""
        for connection in self.idle:
            if not connection.transport.get_write_buffer_size():
                del self.idle[connection]
                connection.transport.close()
                return True
        return False

    def reset_all(self) -> None:
        self.are_reset = True
        for connection in list(self.connections):
            _reset(connection.transport)


def _reset(transport: asyncio.Transport) -> None:
    transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _NO_FAREWELL)
    transport.abort()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol within the bounds of its `ServerConnections`."""

    # The parser does not report how many bytes it consumed. So all arriving bytes are counted, and body bytes, which it
    # hands out during `super().data_received`, are subtracted. The rest is framing. Counts restart with each request.
    was_let_go = False
    """True if reset because the client did not read."""
    _server: ServerConnections
    _error: RequestError | None = None
    _is_deaf = False  # no more input is read
    _is_in_head = True
    _arrives_since: float | None = None  # start of the head, or last progress of the body; None between requests
    _has_moved = False  # the body has made progress since the last look
    _ends_at: float | None = None
    _head_bytes = _header_lines = _beside_body_bytes = 0
    _unread_bytes = 0
    _unread_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as declared upstream
        super().connection_made(transport)
        self.logger = _log
        assert isinstance(self.server_state, ServerConnections)
        self._server = self.server_state
        self._arrives_since = self.loop.time()
        most = self._server.bounds.connections
        if self._server.are_reset:
            _reset(transport)
        elif len(self._server.connections) > most and not self._server.close_idle():
            self._server.answer(
                TooMany(f"expected at most {most} connections (the server's limit `connections`)", limit="connections")
            )
            _reset(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._arrives_since is None and not self._is_deaf:
            data = data.lstrip(b"\r\n")  # some clients put a line end behind a body: it begins nothing
            if not data:
                return
        self._beside_body_bytes += len(data)
        if self._is_deaf:
            if self._beside_body_bytes > 2 * FRAMING_BYTES:
                _reset(self.transport)
            return
        self._parse(data)
        self._bound_rest()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as offer:
            if self._get_upgrade() in _REFUSED:
                return
            # Java's client offers HTTP/2 with its first request, and uvicorn's parser would take the body for that
            # protocol. So parse the head again, without the offer.
            head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
            head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._head_bytes = self._header_lines = 0
            self._parse(b"\r\n".join((*head, b"", b"")) + data[offer.args[0] :])
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    @property
    def _offers_other_protocol(self) -> bool:
        return self.parser.should_upgrade() and self._get_upgrade() not in _REFUSED

    def on_message_begin(self) -> None:
        # uvicorn would queue it, stop reading, and notify only the last one when the client leaves.
        if self._is_answering():
            raise MalformedRequest("expected no request before the answer to the last one")
        super().on_message_begin()
        self._server.idle.pop(self, None)
        self._arrives_since = self.loop.time()
        self._is_in_head = True

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + len(": \r\n")
        self._header_lines += 1
        self._bound_head(self._head_bytes)
        if self._error is not None:
            raise self._error
        if self._is_in_head:  # trailers are dropped: the application has read its headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._offers_other_protocol:
            return
        self._is_in_head = False
        self._arrives_since = self.loop.time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        self._beside_body_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_other_protocol:
            return
        self._arrives_since = self._ends_at = None
        self._head_bytes = self._header_lines = self._beside_body_bytes = 0
        self._is_in_head, self._has_moved = True, False
        super().on_message_complete()
        self._note_idle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._arrives_since is not None and not self._is_deaf:
            self._ends_at = self.loop.time() + _LINGER_S
        self._note_idle()

    def send_400_response(self, msg: str) -> None:
        """Stop reading. Answer, unless a complete request waits for its own answer."""
        self._is_deaf = True
        if self._is_answering() and not self.cycle.more_body:
            self.cycle.keep_alive = False
            return
        self._ends_at = self.loop.time() + _LINGER_S
        if self._is_answering():
            if self.cycle.response_started:
                self.transport.close()
                return
            self.cycle.disconnected = True  # answered here; its reader must not wait for the rest of a body
            self.cycle.message_event.set()
        answer = self._server.answer(self._error or MalformedRequest(f"expected an HTTP request: {msg}"))
        lines = [f"HTTP/1.1 {answer.status_code} {HTTPStatus(answer.status_code).phrase}".encode()]
        lines += [name + b": " + value for name, value in (*answer.raw_headers, (b"connection", b"close"))]
        self.transport.write(b"\r\n".join((*lines, b"", bytes(answer.body))))
        self.transport.write_eof()

    def look(self, now: float) -> None:
        """End the connection if its time is over."""
        if self._has_stopped_reading(now):
            self.was_let_go = True
            self._server.answer(TooSlow("an answer was not read in time", limit="write_timeout"))
            _reset(self.transport)
        elif self._ends_at is not None and now > self._ends_at:
            self.transport.abort()
        elif self._arrives_since is not None and not self._is_deaf:
            bounds = self._server.bounds
            if not self._is_in_head:
                if self._has_moved or self.flow.read_paused:
                    self._arrives_since, self._has_moved = now, False
                elif now > self._arrives_since + bounds.body_s + _LINGER_S:  # its reader would have ended it
                    self.transport.abort()
            elif now > self._arrives_since + bounds.header_s:
                if self._beside_body_bytes:
                    self._error = TooSlow(
                        f"expected the header lines within {bounds.header_s:g} s (the server's limit `header_seconds`)",
                        limit="header_seconds",
                    )
                    self.send_400_response("")
                else:  # the client has sent no byte
                    self.transport.close()

    def _has_stopped_reading(self, now: float) -> bool:
        unread = self.transport.get_write_buffer_size()
        if unread == 0:
            self._unread_since = None
        elif self._unread_since is None or self._unread_bytes - unread >= _STEP_BYTES:
            self._unread_bytes, self._unread_since = unread, now
        else:
            self._unread_bytes = max(self._unread_bytes, unread)
            return now > self._unread_since + self._server.bounds.write_s
        return False

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _note_idle(self) -> None:
        if self._arrives_since is None and not self._is_answering() and not self.transport.is_closing():
            self._server.idle[self] = None

    def _bound_rest(self) -> None:
        if self._is_deaf:
            return
        if self._is_in_head:
            self._bound_head(self._beside_body_bytes)
        elif self._beside_body_bytes > FRAMING_BYTES:
            self._error = HeadersTooLarge(
                f"expected at most {FRAMING_BYTES} bytes around the chunks of a body, got more", limit="header_bytes"
            )
        if self._error is not None:
            self.send_400_response("")

    def _bound_head(self, size_bytes: int) -> None:
        bounds = self._server.bounds
        if size_bytes <= bounds.header_bytes and self._header_lines <= bounds.header_lines:  # each line of a head asks
            return
        for limit, came, most in (
            ("header_bytes", size_bytes, bounds.header_bytes),
            ("header_lines", self._header_lines, bounds.header_lines),
        ):
            if came > most:
                self._error = HeadersTooLarge(
                    f"expected at most {most} {limit.replace('_', ' ')} (the server's limit `{limit}`), got more",
                    limit=limit,
                )
