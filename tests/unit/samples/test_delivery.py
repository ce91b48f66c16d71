"""Masks of samples that share turns, whichever of them a consumer takes (I13)."""

from harness.samples.delivery import deliver
from harness.samples.roles import Role
from harness.sessions.session import Session
from tests.builders import assistant, new_session, take_turn, user

SUMMARY = "The agent has read the file and found that the third line is wrong, and has not mended it yet."


def two_branches() -> Session:
    """A session whose first turn has two continuations."""
    session = new_session()
    take_turn(session, [user("a")], "shared")
    for word in ("left", "right"):
        take_turn(session, [user("a"), assistant("shared"), user(word)], word)
    return session


def test_a_turn_that_samples_share_is_trained_in_the_first_that_is_taken():
    """Taken together they train each token once; the second alone trains the shared ones, too."""
    session = two_branches()
    shared, left, right = (turn.output_ids.size for turn in session.turns)
    samples = session.samples()

    both, second = deliver(samples, {0, 1}), deliver(samples, {1})

    assert [int(sample.loss_mask.sum()) for sample in both] == [shared + left, right]
    assert [int(sample.loss_mask.sum()) for sample in second] == [shared + right]
    assert [sample.weight for sample in second] == [1.0]


def test_a_turn_that_is_not_trained_is_context_of_one_that_is():
    """Only summaries are: the call before one is delivered with mask 0, which the ledger says, too."""
    session = new_session(trained_roles=[Role.COMPACTION])
    main = take_turn(session, [user("a")], "one")
    summary = take_turn(session, [user("a"), assistant("one"), user("Sum it up.")], SUMMARY)
    fresh = take_turn(session, [user(f"So far: {SUMMARY}")], "two")

    [sample] = session.samples()
    ledger = session.ledger()

    assert sample.metadata["turns"] == [main.index, summary.index]
    assert int(sample.loss_mask.sum()) == ledger.trained == summary.output_ids.size
    assert (ledger.masked, ledger.dropped) == (main.output_ids.size, {"main": fresh.output_ids.size})
