"""One sample per turn: the same tokens, cut by the same merge rule, each with its own prompt."""

import numpy as np

from harness.samples.merge import Selection
from harness.sessions.session import Session
from harness.sessions.session_config import AfterIncomplete
from harness.types import FinishReason, SampleStatus
from tests.builders import assistant, new_session, take_turn, tokens_of, user


def a_session(*reasons: FinishReason, selection: Selection = Selection.TURNS) -> Session:
    """A session with one turn per reason, on one branch."""
    session = new_session(selection=selection, after_incomplete=AfterIncomplete.SERVE)
    messages = [user("go")]
    for number, reason in enumerate(reasons):
        text = f"turn {number}"
        take_turn(session, messages, text, reason=reason)
        messages = [*messages, assistant(text), user("more")]
    return session


STOP, ABORT = FinishReason.STOP, FinishReason.ABORT


def test_every_turn_is_a_sample():
    """Its prompt is everything before its output, and all of its output is trained."""
    session = a_session(STOP, STOP, STOP)
    samples = session.samples()

    assert [sample.metadata["turns"] for sample in samples] == [[0], [1], [2]]
    for sample, turn in zip(samples, session.turns, strict=True):
        assert sample.tokens.tolist() == tokens_of(session, turn)
        assert sample.response_length == turn.output_ids.size
        assert sample.loss_mask.tolist() == [1] * turn.output_ids.size
        np.testing.assert_array_equal(sample.rollout_log_probs, turn.logprobs)
    assert session.ledger().difference == 0


def test_the_merge_rule_holds_for_single_turns():
    """Nothing after the first incomplete turn; every sample that is kept says how many turns are not."""
    session = a_session(STOP, ABORT, STOP, STOP)
    samples = session.samples()

    assert [sample.status for sample in samples] == [SampleStatus.COMPLETED, SampleStatus.ABORTED]
    assert [sample.metadata["dropped_trailing_turns"] for sample in samples] == [2, 2]
    assert session.ledger().trained == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert session.ledger().difference == 0


def test_a_turn_that_branches_share_is_one_sample():
    """Trained once, however many branches go on from it."""
    session = a_session(STOP)
    for text in ("left", "right"):
        take_turn(session, [user("go"), assistant("turn 0"), user(text)], text)
    samples = session.samples()

    assert [sample.metadata["turns"] for sample in samples] == [[0], [1], [2]]
    assert session.ledger().trained == sum(int(sample.loss_mask.sum()) for sample in samples)


def test_single_turns_and_whole_branches_train_the_same_tokens():
    """Only the samples differ, not what is in them."""
    reasons = (STOP, STOP, ABORT, STOP)
    merged, single = a_session(*reasons, selection=Selection.LAST), a_session(*reasons)

    assert merged.ledger() == single.ledger()
