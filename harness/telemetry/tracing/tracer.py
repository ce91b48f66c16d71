"""The spans of a server's sessions, offered to a sender at the moments at which the record has them.

A turn is offered with each of its outcomes: one that broke off and goes on later is offered again, under the same ids.
A session that takes over from another offers the turns that it has of it as its own. The session itself is offered when
it is closed, or when its server stops: a later server on the same store offers it again when it has become longer or is
closed.
"""

from collections.abc import Iterable
from weakref import WeakSet

from harness.sessions.paging import SessionStub
from harness.sessions.session import Session
from harness.telemetry.tracing.sender import SpanSender
from harness.telemetry.tracing.spans import TracedSession, TracedTurn
from harness.types import Turn


class SessionTracer:
    """Tells `sender` of the sessions of one server."""

    def __init__(self, sender: SpanSender) -> None:
        self.sender = sender
        self._going_on: set[str] = set()
        """Sessions with turns that were offered since they were themselves."""
        self._closed: WeakSet[Session] = WeakSet()

    def tell_turn(self, session: Session, turn: Turn) -> None:
        """An admitted turn of `session` was recorded."""
        self.sender.offer(TracedTurn.of(session.session_id, turn))
        if session in self._closed:  # an engine has handed it over too late
            self.tell_session(session)
        else:
            self._going_on.add(session.session_id)

    def tell_session(self, held: Session | SessionStub) -> None:
        """A session is held no longer."""
        if isinstance(held, Session):
            self._closed.add(held)
        self._offer(held)

    def tell_takeover(self, previous: Session, session: Session) -> None:
        """`session` has turns of `previous`, which is closed."""
        self.tell_session(previous)
        for turn in session.turns:
            self.sender.offer(TracedTurn.of(session.session_id, turn), is_new=False)
        if session.turns:
            self._going_on.add(session.session_id)

    def tell_open_sessions(self, held: Iterable[Session | SessionStub]) -> None:
        """What the server holds is held by nobody from now on, or by the next server on its store."""
        for each in held:
            if each.session_id in self._going_on:
                self._offer(each)

    def _offer(self, held: Session | SessionStub) -> None:
        self._going_on.discard(held.session_id)
        if held.lasted is not None:
            turns = held.turn_count if isinstance(held, SessionStub) else len(held.turns)
            self.sender.offer(TracedSession(held.session_id, turns, held.lasted))
