"""When a session is offered to a sender of spans: every change is told, and nothing is told twice without need."""

import gc
from collections.abc import Callable
from weakref import ref

from harness.sessions.session import Session
from harness.telemetry.metrics import ServerMetrics
from harness.telemetry.tracing.collector import Collector, traces_url
from harness.telemetry.tracing.sender import SpanSender
from harness.telemetry.tracing.tracer import SessionTracer
from tests.builders import new_session, take_turn, user
from tests.otlp_collector import collecting, said


async def told(tell: Callable[[SessionTracer], None]) -> list[str]:
    """The spans that a collector gets: the index of each turn, and of a session how many turns it has."""
    async with collecting() as collector:
        sender = SpanSender(Collector(traces_url(collector.url)), ServerMetrics())
        async with sender.sending():
            tell(SessionTracer(sender))
    names = {"turn": "harness.turn.index", "session": "harness.turns"}
    return [f"{span.name} {said(span)[names[span.name]]}" for span in collector.taken if span.name in names]


async def test_a_session_is_told_once_for_each_state():
    """A server that stops says nothing again of a session that has not changed, nor of one without turns."""
    session, other = new_session(), new_session()

    def tell(tracer: SessionTracer) -> None:
        tracer.turn_ended(session, take_turn(session, [user("a")]))
        tracer.server_stops([session, other])
        tracer.server_stops([session, other])
        tracer.session_closed(other)

    assert await told(tell) == ["turn 0", "session 1"]


async def test_a_turn_that_ends_after_its_session_was_closed_counts():
    """An engine may hand it over that late; the session is told again, with it."""
    session = new_session()

    def tell(tracer: SessionTracer) -> None:
        tracer.turn_ended(session, take_turn(session, [user("a")]))
        tracer.session_closed(session)
        tracer.turn_ended(session, take_turn(session, [user("b")]))
        tracer.server_stops([session])

    assert await told(tell) == ["turn 0", "session 1", "turn 1", "session 2"]


def test_a_tracer_keeps_no_session_in_memory():
    """One that is closed is gone, whatever waits to be sent."""
    tracer = SessionTracer(SpanSender(Collector("http://127.0.0.1:9/v1/traces"), ServerMetrics()))
    session: Session | None = new_session()
    assert session is not None
    tracer.turn_ended(session, take_turn(session, [user("a")]))
    tracer.session_closed(session)
    kept = ref(session)
    session = None
    gc.collect()
    assert kept() is None
