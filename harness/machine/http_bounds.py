"""HTTP connections that take so much at most, for so long at most.

Whoever reaches the port costs a connection, before anybody has asked for a credential. uvicorn and its parser take any
number of header lines, of any length, at any pace, and hold an answer for ever that is not read. Here

- connections are counted, so that descriptors are left for engines and the store; where there are too many, those that
  are kept and idle make room;
- header lines, and what frames the chunks of a body, are counted and bounded;
- the head of a request has to arrive in time, and its body too: its reader waits for it no longer, and afterwards it
  is discarded for a moment only;
- an answer has to be read: whoever takes nothing of it in time is let go, as if it had closed the connection;
- requests do not overlap. One that comes before the answer to the last is not read, nor is anything behind it, and the
  connection ends with that answer; an agent that leaves is noticed in any case. (uvicorn queues such requests, stops
  reading, and tells only the last one that its client has left.)
- an offer to speak another protocol is declined, and the request served. (Java's client offers HTTP/2 with its first
  request; uvicorn's parser then takes the body for that protocol.)

Times are looked at for all connections of a server together, four times in the shortest bound and once in a second at
least, which costs a request nothing. The bound of
a whole body is its reader's (`server.wire.read_body`): here one ends that stands still.
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
"""Of a request: its head, and what frames the chunks of its body."""

_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)  # uvicorn warns of each request that is none, which its answer counts

_LOOK_EVERY_S = 1.0
_LINGER_S = 2.0  # in which what is still on its way is discarded: a close at once would take the answer along
_STEP_BYTES = 1 << 16  # that a client has to take of an answer, or all that is left, to count as one that reads

_REFUSED = (None, b"websocket")  # no offers: CONNECT, and what has no meaning but as another protocol
_NO_FAREWELL = pack("ii", 1, 0)  # close with a reset, whatever is unsent or unread


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """The most that a connection may cost, and how many there may be."""

    connections: int
    """At one time; one that is too much is reset, unless an idle one can be closed for it."""
    header_bytes: int
    """Of the first line of a request and its header lines together."""
    header_lines: int
    header_s: float
    """For all of them to arrive, from the first byte on."""
    body_s: float
    """Without a byte of the body behind them, though it would be taken."""
    write_s: float
    """Without a client taking anything of what it was sent."""


class ServerConnections(ServerState):
    """The connections of one server, within bounds. Once they have been reset, so is one that comes."""

    are_reset = False

    def __init__(self, bounds: ConnectionBounds, answer: Callable[[RequestError], Response]) -> None:
        super().__init__()
        self.bounds = bounds
        self.answer = answer
        """To what no application has seen, and counts it."""
        self.idle: dict[BoundedProtocol, None] = {}
        """Those that were answered and wait for another request; the one that has waited longest comes first."""

    async def watch_for_ever(self) -> None:
        """End every connection whose time is over."""
        loop = asyncio.get_running_loop()
        shortest_s = min(self.bounds.header_s, self.bounds.body_s, self.bounds.write_s)
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, shortest_s / 4))
            for connection in list(self.connections):
                if isinstance(connection, BoundedProtocol):
                    connection.look(loop.time())

    def close_idle(self) -> bool:
        """Close the connection that has been idle longest, and has its whole answer; whether there is one."""
        for connection in self.idle:
            if not connection.transport.get_write_buffer_size():
                del self.idle[connection]
                connection.transport.close()
                return True
        return False

    def reset_all(self) -> None:
        """Reset every connection, and every one that comes."""
        self.are_reset = True
        for connection in list(self.connections):
            _reset(connection.transport)


def _reset(transport: asyncio.Transport) -> None:
    transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _NO_FAREWELL)
    transport.abort()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol within the bounds of its `ServerConnections`.

    The parser does not say how many bytes it has taken: all that arrive are counted, and those that it hands out as
    body are taken off again. It hands them out inside of `super().data_received`, so what is left after that call lies
    around the body. The counts begin anew with the next request.
    """

    was_let_go = False
    """Reset because its client did not read what it was sent."""
    _server: ServerConnections
    _error: RequestError | None = None
    _is_deaf = False  # nothing more is read
    _is_in_head = True
    _arrives_since: float | None = None  # what arrives now: a head from its beginning, of a body more; or None
    _has_moved = False  # the body, since somebody looked
    _ends_at: float | None = None
    _head_bytes = _header_lines = _beside_body_bytes = 0
    _unread_bytes = 0
    _unread_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as declared upstream
        """A connection begins, unless those of the server have been reset."""
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
        """The connection is over."""
        self._server.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in `data`; the connection ends when there is too much around the body of a request."""
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
        """As upstream, but for a request that offers another protocol: its head is parsed again without the offer."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as offer:
            if self._get_upgrade() in _REFUSED:
                return
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
        """A request begins; one that does so before the answer to the last is not read."""
        if self._is_answering():
            raise MalformedRequest("expected no request before the answer to the last one")
        super().on_message_begin()
        self._server.idle.pop(self, None)
        self._arrives_since = self.loop.time()
        self._is_in_head = True

    def on_url(self, url: bytes) -> None:
        """A piece of the first line."""
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line. Those behind a body are dropped: the application has read its headers."""
        self._head_bytes += len(name) + len(value) + len(": \r\n")
        self._header_lines += 1
        self._bound_head(self._head_bytes)
        if self._error is not None:
            raise self._error
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The body begins, if there is one."""
        if self._offers_other_protocol:
            return
        self._is_in_head = False
        self._arrives_since = self.loop.time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body, whose length its reader bounds."""
        self._has_moved = True
        self._beside_body_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete; another one may begin."""
        if self._offers_other_protocol:
            return
        self._arrives_since = self._ends_at = None
        self._head_bytes = self._header_lines = self._beside_body_bytes = 0
        self._is_in_head, self._has_moved = True, False
        super().on_message_complete()
        self._note_idle()

    def on_response_complete(self) -> None:
        """The answer is complete, which may be before its request is."""
        super().on_response_complete()
        if self._arrives_since is not None and not self._is_deaf:
            self._ends_at = self.loop.time() + _LINGER_S
        self._note_idle()

    def send_400_response(self, msg: str) -> None:
        """Read nothing more; answer, unless a complete request still waits for its own answer, with which it ends."""
        self._is_deaf = True
        if self._is_answering() and not self.cycle.more_body:
            self.cycle.keep_alive = False
            return
        self._ends_at = self.loop.time() + _LINGER_S
        if self._is_answering():
            if self.cycle.response_started:
                self.transport.close()
                return
            self.cycle.disconnected = True  # it has its answer; its reader waits for the rest of a body no longer
            self.cycle.message_event.set()
        answer = self._server.answer(self._error or MalformedRequest(f"expected an HTTP request: {msg}"))
        lines = [f"HTTP/1.1 {answer.status_code} {HTTPStatus(answer.status_code).phrase}".encode()]
        lines += [name + b": " + value for name, value in (*answer.raw_headers, (b"connection", b"close"))]
        self.transport.write(b"\r\n".join((*lines, b"", bytes(answer.body))))
        self.transport.write_eof()

    def look(self, now: float) -> None:
        """End the connection when its time is over."""
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
                else:  # it has not said a word
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
        """Bound what the parser has taken and handed to nobody."""
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
        for limit, came, most in (
            ("header_bytes", size_bytes, bounds.header_bytes),
            ("header_lines", self._header_lines, bounds.header_lines),
        ):
            if came > most:
                self._error = HeadersTooLarge(
                    f"expected at most {most} {limit.replace('_', ' ')} (the server's limit `{limit}`), got more",
                    limit=limit,
                )
