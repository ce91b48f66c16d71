"""Everybody whose request is being worked on, so that a server that stops can give each of them an answer.

Work for a caller waits on behalf of its `ClientConnection`; dismissing that ends the work with a reason, and the reason
is the answer. A server stops in this order: nobody new is let in, those who are there get a while to end by themselves,
then they are dismissed, and their engines get a while to hand over what they have.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from harness.errors import ServerStopping
from harness.machine.deadlines import within
from harness.server.connection import ClientConnection

SERVER_STOPPED = "server_stopped"
"""Logged once when a server has sent everybody away."""

_HAND_OVER_S = 3.0
_ANSWER_S = 1.0  # to write a turn to the disk and its answer to the connection, once an engine has given up

log = structlog.get_logger()


class Callers:
    """Who is being served now."""

    def __init__(self) -> None:
        self._present: set[ClientConnection] = set()
        self._nobody = asyncio.Event()
        self._nobody.set()
        self.is_stopping = False
        """Nobody new is let in."""

    def __len__(self) -> int:
        return len(self._present)

    @contextmanager
    def present(self, client: ClientConnection) -> Iterator[None]:
        """Work for `client` in the block. Raises `ServerStopping` when the server lets nobody in any more."""
        if self.is_stopping:
            raise _stopping()
        self._present.add(client)
        self._nobody.clear()
        try:
            yield
        finally:
            self._present.discard(client)
            if not self._present:
                self._nobody.set()

    async def send_away(self, *, grace_s: float) -> None:
        """Let nobody in, and return when everybody has been answered: those who take longer than `grace_s` are told."""
        self.is_stopping = True
        before = len(self)
        has_ended = await within(grace_s, self._nobody.wait())
        told = len(self)
        if not has_ended:
            self.dismiss(hand_over_s=_HAND_OVER_S)
            await within(_HAND_OVER_S + _ANSWER_S, self._nobody.wait())
        log.info(SERVER_STOPPED, requests=before, cut_short=told, unanswered=len(self))

    def dismiss(self, *, hand_over_s: float) -> None:
        """Tell everybody that the server stops; what their engines have they hand over within `hand_over_s`."""
        for client in list(self._present):
            client.dismiss(_stopping(), hand_over_s=hand_over_s)


def _stopping() -> ServerStopping:
    return ServerStopping("the server stops; ask the next one, the same request goes on where this one ended")
