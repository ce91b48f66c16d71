"""HTTP connections that report when their client has left, and when an answer was not read.

A client that times out just as its answer arrives retries, and the retry must get that same answer (I5). So the server
must know whether an answer was read. It cannot know that one was, but the client's kernel often shows that one was not,
at three moments:

1. Before the answer is sent. The client has closed its side, and its FIN waits in our socket. The event loop notices
   some rounds later; the kernel knows already (`POLLRDHUP`). `Delivery` asks it when created.
2. When the last byte has been written. If the client closed in between, with bytes unread or its socket gone, its
  kernel
   answers with a reset, an error on our socket (`POLLERR`, `POLLHUP`). `Delivery.hand_over` asks for it, and otherwise
   marks the answer delivered.
3. Later. The reset arrives after 2. The loop then ends the connection with a `ConnectionError`, `on_reset` is called,
   and the mark is withdrawn.

The third window ends when the next request begins on the connection: a client that goes on has read its last answer,
and a later reset concerns another one. A plain close ends it too and proves nothing: clients close the same way whether
they keep or discard their answer. A proxy hides all of this, because it reads for the client; an answer then counts as
delivered once the proxy has it.
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
"""Key of the `Connection` in a request scope's state."""

_FAILED = select.POLLHUP | select.POLLERR
_CLOSED = getattr(select, "POLLRDHUP", 0) | _FAILED  # the first exists on Linux only


class Connection(Protocol):
    """Connection that carries an answer."""

    on_reset: Callable[[], None] | None
    """Called if the connection is reset before its next request."""

    on_lost: Callable[[], None] | None
    """Called when the connection is over."""

    is_lost: bool
    """True once the event loop has noticed the end."""

    peer: Peer | None
    """Other end; None without an address."""

    def is_closed_by_client(self) -> bool:
        """Return True if the client has closed its side, noticed by the event loop or not."""

    def is_reset(self) -> bool:
        """Return True if the answer met a closed client."""


def connection_of(scope: Scope) -> Connection | None:
    """Return a request's connection; None under another web server."""
    found: Connection | None = scope.get("state", {}).get(CONNECTION)
    return found


class Delivery:
    """Tracks whether one answer reached its client; created before the answer is sent.

    Calls `mark` on a change: True at most once, False only after it.
    """

    def __init__(self, scope: Scope, mark: Callable[[bool], None]) -> None:
        self._connection = connection_of(scope)
        self._mark = mark
        self._is_handed_over = False
        self._is_lost = self._connection is not None and self._connection.is_closed_by_client()
        if self._connection is not None:
            self._connection.on_reset = self._lose

    async def hand_over(self) -> None:
        """Check the connection after the last byte, and mark the answer."""
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
        """Note both ends, from the socket and not from headers."""
        super().connection_made(transport)
        if self.client and self.server:
            self.peer = Peer(Ends(*self.client, self.server[0], self.server[1] or 0))

    def on_message_begin(self) -> None:
        """Forget the last answer: the next request proves that it was read."""
        super().on_message_begin()
        self.on_reset = None
        self.scope["state"][CONNECTION] = self

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify `on_lost`, and after a reset `on_reset`. A plain close proves nothing."""
        self.is_lost = True
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()
        if (self.was_let_go or isinstance(exc, ConnectionError)) and self.on_reset is not None:
            self.on_reset()

    def is_closed_by_client(self) -> bool:
        """See `Connection`; asks the kernel, which knows earlier than the event loop."""
        return self.is_lost or self._poll(_CLOSED)

    def is_reset(self) -> bool:
        """See `Connection`."""
        return self.was_let_go or self._poll(_FAILED)

    def _poll(self, events: int) -> bool:
        socket = self.transport.get_extra_info("socket")
        if socket is None or socket.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(socket.fileno(), events)
        return bool(poll.poll(0))
