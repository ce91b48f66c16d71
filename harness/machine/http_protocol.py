"""HTTP connections that tell when their client has left, and when an answer was not read.

A client that times out just when its answer comes retries, and its retry is to get that answer and not another one
(I5). So the server has to know whether an answer was read. It cannot know that one was, but it can often know that one
was not, because of what the client's kernel does. There are three moments at which the truth may come out:

1. Before the answer is sent. The client has closed its side, and its FIN waits in our socket. The event loop hears of
   that some rounds later, when it next reads; the kernel knows already (`POLLRDHUP`). `Delivery` asks it as it is made.
2. When the last byte has been written. The client closed in between: it leaves bytes unread, or our bytes meet a socket
   that is gone. In both cases its kernel answers with a reset, which shows as an error on our socket (`POLLERR`,
   `POLLHUP`) even before the loop has looked. `Delivery.hand_over` asks for it, and marks the answer delivered if there
   is none.
3. Later. The reset is still on its way when 2 is asked. The loop then ends the connection with a `ConnectionError`
   instead of a plain end, `on_reset` is called, and a mark that was set is taken back.

The third window ends when the next request begins on the same connection: a client that goes on has read its last
answer, and a reset from then on is about another one. A plain close ends it too and says nothing: clients that have
read their answer close in the same way, also those that throw it away. A proxy in between hides all of this, because it
reads for the client; then an answer counts as delivered once the proxy has it.
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
"""Where the state of a request's scope has its `Connection`."""

_FAILED = select.POLLHUP | select.POLLERR
_CLOSED = getattr(select, "POLLRDHUP", 0) | _FAILED  # the first exists on Linux only


class Connection(Protocol):
    """The connection that carries an answer, as far as the answer asks."""

    on_reset: Callable[[], None] | None
    """Called when the connection is reset before its next request."""

    on_lost: Callable[[], None] | None
    """Called when the connection is over."""

    is_lost: bool
    """It is over, as far as the event loop has noticed."""

    peer: Peer | None
    """The other end; None of one without an address."""

    def is_closed_by_client(self) -> bool:
        """The client has closed its side, whether the event loop has noticed or not."""

    def is_reset(self) -> bool:
        """The answer met a client that had closed."""


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a request; None under a web server that has none of ours."""
    found: Connection | None = scope.get("state", {}).get(CONNECTION)
    return found


class Delivery:
    """Whether one answer reached its client, as far as a server can tell; made before the answer is sent.

    Tells `mark` whenever that changes: True at most once, and False only after it.
    """

    def __init__(self, scope: Scope, mark: Callable[[bool], None]) -> None:
        self._connection = connection_of(scope)
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


class ResetAwareProtocol(BoundedProtocol):
    """uvicorn's HTTP protocol within bounds, a `Connection` to the requests that it carries."""

    on_reset: Callable[[], None] | None = None
    on_lost: Callable[[], None] | None = None
    is_lost = False
    peer: Peer | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as declared upstream
        """A connection begins; uvicorn knows its ends from the socket, whatever its headers will say."""
        super().connection_made(transport)
        if self.client and self.server:
            self.peer = Peer(Ends(*self.client, self.server[0], self.server[1] or 0))

    def on_message_begin(self) -> None:
        """The next request says that the last answer was read."""
        super().on_message_begin()
        self.on_reset = None
        self.scope["state"][CONNECTION] = self

    def connection_lost(self, exc: Exception | None) -> None:
        """A reset, of theirs or ours, says that the last answer was not read; a plain close says nothing."""
        self.is_lost = True
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()
        if (self.was_let_go or isinstance(exc, ConnectionError)) and self.on_reset is not None:
            self.on_reset()

    def is_closed_by_client(self) -> bool:
        """See `Connection`; asks the kernel, because the event loop learns of it some rounds later."""
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
