"""HTTP connections that report when their client has left, and when an answer was not read.

A client that times out just as its answer arrives retries, and the retry must get that same answer (I5). So the server
must know whether an answer was read. It cannot know that one was, but the client's kernel often shows that one was not:

1. Before the answer is sent: the client's FIN waits in our socket (`POLLRDHUP`), and the event loop has not noticed.
   `Delivery` asks the kernel when created.
2. When the last byte has been written. If the client closed in between, with bytes unread or its socket gone, its
   kernel answers with a reset, an error on our socket (`POLLERR`, `POLLHUP`). `Delivery.hand_over` asks for it, and
   otherwise marks the answer delivered.
3. Later. The reset arrives after 2. The loop ends the connection with a `ConnectionError`, `on_reset` is called, and
   the mark is withdrawn.

The third window ends when the next request begins on the connection, or with a plain close, which proves nothing. A
proxy reads for the client.
"""

import asyncio
import select
from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope

from harness.machine.http_bounds import BoundedProtocol
from harness.machine.peer_process import Ends
from harness.machine.peer_processes import Peer

CONNECTION = "harness.connection"
"""Key of the `Connection` in a scope's state."""

_FAILED = select.POLLHUP | select.POLLERR
_CLOSED = getattr(select, "POLLRDHUP", 0) | _FAILED  # the first exists on Linux only


class Connection(Protocol):
    """Connection that carries an answer."""

    on_reset: Callable[[], None] | None
    """Callback for a reset before the next request."""

    on_lost: Callable[[], None] | None
    """Callback for the end."""

    is_lost: bool
    """True once the event loop noticed the end."""

    peer: Peer | None
    """Other end; None without an address."""

    def is_closed_by_client(self) -> bool:
        """Return True if the client has closed its side, even if the event loop does not know."""

    def is_reset(self) -> bool:
        """Return True if the answer met a closed client."""


def connection_of(scope: Scope) -> Connection | None:
    """Return a request's connection, or None."""
    found: Connection | None = scope.get("state", {}).get(CONNECTION)
    return found


class Delivery:
    """Delivery state of one answer, created before sending. Calls `mark` with True at most once, then maybe False."""

    def __init__(self, scope: Scope, mark: Callable[[bool], None]) -> None:
        self._connection = connection_of(scope)
        self._mark = mark
        self._is_handed_over = False
        self._is_lost = self._connection is not None and self._connection.is_closed_by_client()
        if self._connection is not None:
            self._connection.on_reset = self._lose

    async def hand_over(self) -> None:
        """Mark the answer, after its last byte, unless reset."""
        self._is_lost |= self._connection is not None and self._connection.is_reset()
        self._is_handed_over = not self._is_lost
        if self._is_handed_over:
            self._mark(True)

    def _lose(self) -> None:
        self._is_lost = True
        if self._is_handed_over:
            self._mark(False)


class ResetAwareProtocol(BoundedProtocol):
    """uvicorn's bounded HTTP protocol as a `Connection`."""

    on_reset: Callable[[], None] | None = None
    on_lost: Callable[[], None] | None = None
    is_lost = False
    peer: Peer | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as declared upstream
        super().connection_made(transport)
        if self.client and self.server:
            self.peer = Peer(Ends(*self.client, self.server[0], self.server[1] or 0))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.on_reset = None  # the next request proves that the last answer was read
        self.scope["state"][CONNECTION] = self

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()
        if (self.was_let_go or isinstance(exc, ConnectionError)) and self.on_reset is not None:
            self.on_reset()

    def is_closed_by_client(self) -> bool:
        return self.is_lost or self._poll(_CLOSED)

    def is_reset(self) -> bool:
        return self.was_let_go or self._poll(_FAILED)

    def _poll(self, events: int) -> bool:
        socket = self.transport.get_extra_info("socket")
        if socket is None or socket.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(socket.fileno(), events)
        return bool(poll.poll(0))
