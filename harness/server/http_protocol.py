"""HTTP connections that tell when an answer was not read.

A server cannot know that an answer arrived, but it can often know that one did not: the client had closed before the
last byte left, or it closed with bytes unread, which makes its kernel reset the connection. That is what a client does
that times out just when its answer comes; its retry is to get that answer and not another one (I5). A proxy in between
hides both, and nobody sees a client that has read an answer and throws it away.
"""

import asyncio
import select
import struct
from collections.abc import Callable
from socket import SO_LINGER, SOL_SOCKET
from typing import Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

CONNECTION = "harness.connection"
"""Where the state of a request's scope has its `Connection`."""

BESIDE_BODY_BYTES = 1 << 20
"""Of a request: its first line, its header lines, what frames the chunks of its body."""

_NO_FAREWELL = struct.pack("ii", 1, 0)  # close with a reset, whatever is unsent or unread
_FAILED = select.POLLHUP | select.POLLERR
_CLOSED = getattr(select, "POLLRDHUP", 0) | _FAILED  # the first exists on Linux only


class Connection(Protocol):
    """What an answer wants to know of the connection that carries it."""

    on_reset: Callable[[], None] | None
    """Called when the connection is reset before its next request."""

    def is_closed_by_client(self) -> bool:
        """The client has closed its side, whether anybody has noticed or not."""

    def is_reset(self) -> bool:
        """What was sent met a client that had closed."""


class Delivery:
    """Whether one answer reached its client, as far as a server can tell; made before the answer is sent.

    Tells `mark` whenever that changes.
    """

    def __init__(self, scope: Scope, mark: Callable[[bool], None]) -> None:
        self._connection: Connection | None = scope.get("state", {}).get(CONNECTION)
        self._mark = mark
        self._is_handed_over = False
        self._is_lost = self._connection is not None and self._connection.is_closed_by_client()
        if self._connection is not None:
            self._connection.on_reset = self._lose

    async def hand_over(self) -> None:
        """The last byte has gone to the connection."""
        self._is_lost |= self._connection is not None and self._connection.is_reset()
        self._is_handed_over = not self._is_lost
        if self._is_handed_over:
            self._mark(True)

    def _lose(self) -> None:
        self._is_lost = True
        if self._is_handed_over:
            self._mark(False)


class Connections(ServerState):
    """The connections of one server. Once they have been reset, so is one that had been accepted and not begun."""

    are_reset = False

    def reset_all(self) -> None:
        """Reset every connection, and every one that comes."""
        self.are_reset = True
        for connection in list(self.connections):
            _reset(connection.transport)


def _reset(transport: asyncio.Transport) -> None:
    transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _NO_FAREWELL)
    transport.abort()


class ResetAwareProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, a `Connection` to the requests that it carries; part of a server's `Connections`.

    uvicorn takes any number of header lines, from whoever reaches the port; here they end at `BESIDE_BODY_BYTES`.
    """

    on_reset: Callable[[], None] | None = None
    _is_gone = False
    _beside_body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as declared upstream
        """A connection begins, unless those of the server have been reset."""
        super().connection_made(transport)
        if isinstance(self.server_state, Connections) and self.server_state.are_reset:
            _reset(transport)

    def data_received(self, data: bytes) -> None:
        """Take in `data`; the connection ends with 400 when there is too much around the body of a request."""
        self._beside_body_bytes += len(data)
        super().data_received(data)
        if self._beside_body_bytes > BESIDE_BODY_BYTES and not self.transport.is_closing():
            self.send_400_response("the header lines of this request are too long")

    def on_body(self, body: bytes) -> None:
        """A piece of the body, which whoever reads it bounds."""
        self._beside_body_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """What comes now is another request."""
        self._beside_body_bytes = 0
        super().on_message_complete()

    def on_message_begin(self) -> None:
        """The next request says that the last answer was read."""
        super().on_message_begin()
        self.on_reset = None
        self.scope["state"][CONNECTION] = self

    def connection_lost(self, exc: Exception | None) -> None:
        """A reset says that the last answer was not read; a plain close says nothing."""
        self._is_gone = True
        super().connection_lost(exc)
        if isinstance(exc, ConnectionError) and self.on_reset is not None:
            self.on_reset()

    def is_closed_by_client(self) -> bool:
        """See `Connection`; asks the kernel, because the event loop learns of it some rounds later."""
        return self._is_gone or self._poll(_CLOSED)

    def is_reset(self) -> bool:
        """See `Connection`."""
        return self._poll(_FAILED)

    def _poll(self, events: int) -> bool:
        socket = self.transport.get_extra_info("socket")
        if socket is None or socket.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(socket.fileno(), events)
        return bool(poll.poll(0))
