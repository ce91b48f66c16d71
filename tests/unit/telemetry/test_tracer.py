"""When a session is offered to a sender of spans: every change is told, and nothing is told twice without need."""

import asyncio
import gc
from collections.abc import Callable
from weakref import ref

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from harness.server.telemetry.metrics import ServerMetrics
from harness.server.telemetry.tracing.collector import traces_url
from harness.server.telemetry.tracing.sender import SpanSender
from harness.server.telemetry.tracing.spans import TracedSession, TracedTurn
from harness.server.telemetry.tracing.tracer import SessionTracer
from harness.sessions.session import Session
from harness.sessions.session_config import SessionConfig
from tests.builders import new_session, take_turn, user
from tests.otlp_collector import collecting, said
from tests.thoroughness import examples


async def collect(tell: Callable[[SessionTracer], None]) -> list[Span]:
    """The spans that a collector gets, in the order in which they come."""
    async with collecting() as collector:
        sender = SpanSender(traces_url(collector.url), ServerMetrics())
        async with sender.sending():
            tell(SessionTracer(sender))
    return collector.taken


async def told(tell: Callable[[SessionTracer], None]) -> list[str]:
    """Those of turns by their index, those of sessions by how many turns they have."""
    names = {"turn": "harness.turn.index", "session": "harness.turns"}
    return [f"{span.name} {said(span)[names[span.name]]}" for span in await collect(tell) if span.name in names]


def named_session(number: int) -> Session:
    """An open session with an id of its own."""
    return Session(f"{number:032x}", f"key {number}", SessionConfig(), 1_000.0)


async def test_a_session_is_told_once_for_each_state():
    """A server that stops says nothing again of a session that has not changed, nor of one without turns."""
    session, other = new_session(), new_session()

    def tell(tracer: SessionTracer) -> None:
        tracer.tell_turn(session, take_turn(session, [user("a")]))
        tracer.tell_open_sessions([session, other])
        tracer.tell_open_sessions([session, other])
        tracer.tell_session(other)

    assert await told(tell) == ["turn 0", "session 1"]


def offer_whole(tracer: SessionTracer, sessions: list[Session]) -> None:
    """Offer sessions as they are now."""
    for session in sessions:
        if session.lasted is not None:
            tracer.sender.offer(TracedSession(session.session_id, len(session.turns), session.lasted))
            for turn in session.turns:
                tracer.sender.offer(TracedTurn.of(session.session_id, turn))


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["turn", "close", "take over", "next server"]), st.integers(0, 3)), max_size=25
)


@settings(max_examples=examples(60), deadline=None)
@given(actions=ACTIONS)
def test_in_the_end_everything_has_been_told_as_it_is(actions: list[tuple[str, int]]):
    """Turns, ends, takeovers and restarts in any order: the last word on each span is that of the sessions."""
    sessions = [named_session(number) for number in range(4)]
    past: list[Session] = []

    def tell(tracer: SessionTracer) -> None:
        for number, (action, which) in enumerate(actions):
            session = sessions[which]
            match action:
                case "turn":
                    tracer.tell_turn(session, take_turn(session, [user(f"question {number}")]))
                case "close":
                    past.append(session)
                    tracer.tell_session(session)
                    sessions[which] = named_session(100 + number)
                case "take over":
                    sessions[which] = named_session(100 + number)
                    for turn in session.turns:
                        sessions[which].restore(turn)
                    past.append(session)
                    tracer.tell_takeover(session, sessions[which])
                case _:
                    tracer.tell_open_sessions(sessions)
                    tracer = SessionTracer(tracer.sender)
        tracer.tell_open_sessions(sessions)

    spans, expected = (
        asyncio.run(collect(tell)),
        asyncio.run(collect(lambda tracer: offer_whole(tracer, [*past, *sessions]))),
    )
    assert {span.span_id: span for span in spans} == {span.span_id: span for span in expected}


async def test_a_turn_that_ends_after_its_session_was_closed_counts():
    """An engine may hand it over that late; the session is told again, with it."""
    session = new_session()

    def tell(tracer: SessionTracer) -> None:
        tracer.tell_turn(session, take_turn(session, [user("a")]))
        tracer.tell_session(session)
        tracer.tell_turn(session, take_turn(session, [user("b")]))
        tracer.tell_open_sessions([session])

    assert await told(tell) == ["turn 0", "session 1", "turn 1", "session 2"]


async def test_a_tracer_keeps_no_session_in_memory():
    """One that is closed is gone, whatever waits to be sent."""
    sender = SpanSender("http://127.0.0.1:9/v1/traces", ServerMetrics())
    async with sender.sending():
        tracer = SessionTracer(sender)
        session: Session | None = new_session()
        assert session is not None
        tracer.tell_turn(session, take_turn(session, [user("a")]))
        tracer.tell_session(session)
        kept = ref(session)
        session = None
        gc.collect()
        assert kept() is None
        sender.hurry()
