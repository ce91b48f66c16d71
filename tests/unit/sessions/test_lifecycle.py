"""The tables: what a session lets happen, and what the gate says to new work."""

import pytest

from harness.errors import (
    ClientLeft,
    EngineRejected,
    EngineUnavailable,
    GateClosed,
    HarnessError,
    IllegalTransition,
    LimitReached,
    ServerStopping,
    SessionClosing,
    StoreFull,
)
from harness.sessions.lifecycle import TRANSITIONS, Command, Phase, advance, end_of_error, end_of_output
from harness.turn_ends import TURN_ENDS, TurnEnd, TurnStatus, status_of
from harness.types import FinishReason
from tests.builders import admit, finish, new_session, take_turn, user


@pytest.mark.parametrize("phase", [Phase.CLOSING, Phase.ENDED, Phase.CLOSED])
def test_a_pair_that_the_table_lacks_is_illegal(phase):
    with pytest.raises(IllegalTransition, match=f"{phase} cannot {Command.ADMIT}"):
        advance(phase, Command.ADMIT)


def test_no_command_reopens_a_session():
    """Phases only ever move on: open, closing or ended, closed."""
    order = list(Phase)

    assert all(order.index(after) >= order.index(before) for (before, _), after in TRANSITIONS.items())


@pytest.mark.parametrize("phase", list(Phase))
def test_what_was_admitted_may_always_be_recorded(phase):
    """Tokens that were generated are recorded, whatever happened to the session meanwhile (I4)."""
    session = new_session()
    admission = admit(session, [user("a")])
    session.phase = phase

    turn = finish(session, admission)

    assert (session.turns, session.phase) == ([turn], phase)


@pytest.mark.parametrize("phase", [Phase.CLOSING, Phase.ENDED, Phase.CLOSED])
def test_a_session_that_is_not_open_admits_nothing_and_stays_as_it_is(phase):
    """A refused turn is counted, and that is all that changes."""
    session = new_session()
    first = take_turn(session, [user("a")])
    session.phase = phase

    with pytest.raises(SessionClosing):
        admit(session, [user("b")])

    assert (session.turns, session.turns_in_flight) == ([first], [])


def test_a_drain_between_attach_and_admit_is_seen():
    """A place found in an open session is worth nothing once it is drained."""
    session = new_session()
    admission = admit(session, [user("a")])
    point = session.attach(session.history.read([user("b")], ()), [user("b")])
    session.drain()

    with pytest.raises(SessionClosing):
        session.admit(point, admission.request, 1_000, 0.0)

    assert [each.index for each in session.turns_in_flight] == [0]


def test_drain_and_close_tell_whether_they_changed_something():
    """Both are idempotent, and a closed session stays closed when it is drained."""
    session = new_session()

    assert [session.drain(), session.drain(), session.close(), session.close(), session.drain()] == [
        True,
        False,
        True,
        False,
        False,
    ]
    assert session.phase is Phase.CLOSED


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        (FinishReason.STOP, TurnStatus.COMPLETED),
        (FinishReason.LENGTH, TurnStatus.TRUNCATED),
        (FinishReason.REPEAT, TurnStatus.TRUNCATED),
        (FinishReason.ABORT, TurnStatus.ABORTED),
        (None, TurnStatus.ABORTED),
    ],
)
@pytest.mark.parametrize("has_calls", [False, True])
@pytest.mark.parametrize("is_drained", [False, True])
@pytest.mark.parametrize("is_stale", [False, True])
def test_only_a_stop_is_worth_a_completed_turn(finish, status, has_calls, is_drained, is_stale):
    """What an engine cut short is never COMPLETED (I2), whatever else is so."""
    end = end_of_output(finish, has_calls=has_calls, is_drained=is_drained, is_stale=is_stale)

    assert status_of(end, sampled=1) is status


def test_an_output_that_broke_off_ends_for_the_strongest_reason():
    """A drain before anything else: the turn is a sample's last."""
    assert [
        end_of_output(FinishReason.ABORT, has_calls=False, is_drained=is_drained, is_stale=is_stale)
        for is_drained, is_stale in [(True, True), (True, False), (False, True), (False, False)]
    ] == [TurnEnd.DRAINED, TurnEnd.DRAINED, TurnEnd.STALE, TurnEnd.ENGINE_ABORTED]


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (ClientLeft("left"), TurnEnd.CLIENT_LEFT),
        (ServerStopping("stops"), TurnEnd.SERVER_STOPPED),
        (GateClosed("paused for too long"), TurnEnd.GATE_TIMEOUT),
        (SessionClosing("ended"), TurnEnd.SESSION_ENDED),
        (LimitReached("too old"), TurnEnd.STALE),
        (EngineUnavailable("down"), TurnEnd.ENGINE_FAILED),
        (EngineRejected("no"), TurnEnd.ENGINE_FAILED),
        (StoreFull("disk"), TurnEnd.SERVER_FAILED),
        (HarnessError("a bug"), TurnEnd.SERVER_FAILED),
    ],
)
def test_every_error_that_ends_a_turn_has_its_end(error, end):
    assert end_of_error(error) is end


def test_no_end_lets_a_partial_be_served_and_wait_as_well():
    """What waits for its continuation is no answer, and what is COMPLETED or FAILED waits for nothing."""
    assert set(TURN_ENDS) == set(TurnEnd)
    for rule in TURN_ENDS.values():
        assert rule.finish_reason is None or not rule.waits
        assert not rule.waits or rule.status is TurnStatus.ABORTED
        assert rule.unsampled in {rule.status, TurnStatus.FAILED}
