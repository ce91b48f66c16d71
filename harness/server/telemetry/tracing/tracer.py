"""Offer the spans of a server's sessions to a sender as the record gains them.

A turn is offered with each outcome, under the same ids. A session that takes over offers its turns as its own. A
session is offered when closed or when its server stops, and again by a later server if it has grown.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakSet

from harness.server.telemetry.tracing.spans import TracedSession, TracedTurn
from harness.sessions.paging import SessionStub
from harness.sessions.session import Session
from harness.types import Turn

if TYPE_CHECKING:
    from harness.server.telemetry.tracing.sender import SpanSender


class SessionTracer:
    """Reporter of one server's sessions to `sender`."""

    def __init__(self, sender: "SpanSender") -> None:
        self.sender = sender
        self._going_on: set[str] = set()
        """Sessions with turns offered since the session itself was."""
        self._closed: WeakSet[Session] = WeakSet()

    def tell_turn(self, session: Session, turn: Turn) -> None:
        self.sender.offer(TracedTurn.of(session.session_id, turn))
        if session in self._closed:  # the engine returned it late
            self.tell_session(session)
        else:
            self._going_on.add(session.session_id)

    def tell_session(self, held: Session | SessionStub) -> None:
        if isinstance(held, Session):
            self._closed.add(held)
        self._offer(held)

    def tell_takeover(self, previous: Session, session: Session) -> None:
        """Report that `session` continues the closed `previous`."""
        self.tell_session(previous)
        for turn in session.turns:
            self.sender.offer(TracedTurn.of(session.session_id, turn), is_new=False)
        if session.turns:
            self._going_on.add(session.session_id)

    def tell_open_sessions(self, held: Iterable[Session | SessionStub]) -> None:
        """Report every open session, when the server stops."""
        for each in held:
            if each.session_id in self._going_on:
                self._offer(each)

    def _offer(self, held: Session | SessionStub) -> None:
        self._going_on.discard(held.session_id)
        if held.lasted is not None:
            turns = held.turn_count if isinstance(held, SessionStub) else len(held.turns)
            self.sender.offer(TracedSession(held.session_id, turns, held.lasted))
