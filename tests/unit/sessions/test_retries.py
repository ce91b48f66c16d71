"""What a request means whose body the session has seen before (I5)."""

import pytest

from harness.errors import ClientLeft, EngineUnavailable, SessionClosing
from harness.sessions.continuation import Output
from harness.sessions.retries import TREATMENTS, CallParts, RetryStanding, Treatment, request_digest
from harness.sessions.session import Session
from harness.sessions.turn_outcome import break_off_turn
from harness.tokens.sent_body import KEY_BYTES, SentBody
from harness.turn_ends import TurnEnd
from tests.builders import admit, finish, new_session, take_turn, user

HI = [user("hi")]


def turn_of(session: Session):
    """An admitted turn, and the digest of its body."""
    admission = admit(session, HI)
    return admission, admission.request.digest


def test_the_table_covers_every_standing():
    """Whether the client says that it retries matters in two rows only."""
    assert set(TREATMENTS) == {(standing, says) for standing in RetryStanding for says in (False, True)}
    differ = {each for each in RetryStanding if TREATMENTS[each, False] is not TREATMENTS[each, True]}
    assert differ == {RetryStanding.AWAITED, RetryStanding.DELIVERED}


def test_a_body_that_was_never_seen_is_sampled():
    """Saying that one retries does not make it a retry."""
    assert new_session().treatment("x", says_retry=True) == (Treatment.SAMPLE, -1)


def test_a_turn_in_flight_is_joined_once_its_client_has_left():
    """While the client waits, the same body is another sample; a retry by its own word waits too."""
    session = new_session()
    admission, digest = turn_of(session)

    assert session.treatment(digest, says_retry=False) == (Treatment.SAMPLE, 0)
    assert session.treatment(digest, says_retry=True) == (Treatment.JOIN, 0)
    session.abandon(admission.index)
    assert session.treatment(digest, says_retry=False) == (Treatment.JOIN, 0)


@pytest.mark.parametrize("error", [ClientLeft("gone"), EngineUnavailable("down")])
def test_a_turn_that_broke_off_is_taken_up_as_itself(error):
    """Same index, parameters, seed and prompt; the outcome takes the place of the first."""
    session = new_session()
    admission, digest = turn_of(session)
    session.record(break_off_turn(admission, Output.nothing(), error, 1.0))

    assert session.treatment(digest, says_retry=False) == (Treatment.CONTINUE, 0)
    again = session.take_up(0, 2.0, "b" * 32)
    assert (again.index, again.params, again.ordinal) == (0, admission.params, admission.ordinal)
    assert again.prompt_ids.tolist() == admission.prompt_ids.tolist()
    finish(session, again, "yo")
    assert [turn.end for turn in session.turns] == [TurnEnd.MODEL]
    assert session.ledger().difference == 0


def test_turns_of_one_body_can_be_forfeited_in_any_order():
    """A bug of ours that costs both leaves neither behind, and the next request of that body begins anew."""
    for order in ([0, 1], [1, 0]):
        session = new_session()
        _, digest = turn_of(session)
        turn_of(session)
        for index in order:
            session.forfeit(index)

        assert session.turns_in_flight == []
        assert session.treatment(digest, says_retry=True)[0] is Treatment.SAMPLE


def test_an_answer_nobody_got_is_replayed_and_one_that_arrived_is_not():
    """Delivered answers come again only for a client that says that it retries."""
    session = new_session()
    admission, digest = turn_of(session)
    finish(session, admission, "yo")

    assert session.treatment(digest, says_retry=False) == (Treatment.REPLAY, 0)
    session.mark_delivered(0)
    assert session.treatment(digest, says_retry=False) == (Treatment.SAMPLE, 0)
    assert session.treatment(digest, says_retry=True) == (Treatment.REPLAY, 0)


def test_after_a_restart_only_what_was_built_on_counts_as_delivered():
    """The note of a delivery may be older than the news that nobody read the answer."""
    session = new_session()
    first = take_turn(session, HI, "yo")
    take_turn(session, [*HI, first.reply, user("continue")], "yo")
    for index in (0, 1):
        session.mark_delivered(index)

    session.doubt_deliveries()

    assert [turn.delivered for turn in session.turns] == [True, False]


def test_a_drained_session_answers_no_retry():
    session = new_session()
    admission, digest = turn_of(session)
    finish(session, admission, "yo")
    session.drain()

    with pytest.raises(SessionClosing):
        session.treatment(digest, says_retry=True)
    with pytest.raises(SessionClosing):
        session.take_up(0, 2.0, "b" * 32)


def test_the_clients_own_key_tells_equal_bodies_apart():
    """The same key is the same call, another key another one."""

    def digest(idempotency_key: str = "", dialect: str = "openai_chat", conversation: bytes = b"c") -> str:
        return request_digest(
            CallParts(b"{}", dialect, idempotency_key, conversation), SentBody(b"{}", b"k" * KEY_BYTES)
        )

    assert len({digest(), digest("1"), digest("2"), digest(dialect="other"), digest(conversation=b"d")}) == 5
    assert digest("1") == digest("1")
