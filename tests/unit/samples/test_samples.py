"""From turns to samples: the merge rule (I3), the columns a trainer reads, and the ledger (I4)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from harness.errors import EngineUnavailable, LedgerImbalance, UnknownWeightVersion
from harness.samples.delivery import Selection
from harness.samples.versions import policy_version
from harness.sessions.ledger import Ledger, account, total
from harness.sessions.session import Session
from harness.sessions.session_config import AfterIncomplete
from harness.sessions.turn_outcome import Reply, end_turn
from harness.turn_ends import TurnEnd, TurnStatus
from harness.types import FinishReason, SampleStatus, Turn, VersionSpan
from tests.builders import admit, assistant, fail, finish, new_session, output_of, sampled, take_turn, tokens_of, user
from tests.session_servers.store_file import NONE_UNKNOWN


def grow(session: Session, *answers: str, incomplete: int | None = None, reason=FinishReason.LENGTH) -> list[Turn]:
    """A branch with one turn per answer; the turn number `incomplete` ends with `reason`."""
    messages = [user("start")]
    turns = []
    for number, text in enumerate(answers):
        ending = reason if number == incomplete else FinishReason.STOP
        turns.append(take_turn(session, messages, text, reason=ending))
        messages = [*messages, assistant(text), user(f"after {text}")]
    return turns


def test_a_branch_becomes_one_sample_of_all_its_tokens():
    """Tokens are the last turn's prompt and output; the response begins with the first sampled token."""
    session = new_session(metadata={"task": 7})
    turns = grow(session, "one", "two", "three")

    [sample] = session.samples()

    assert sample.tokens.tolist() == tokens_of(session, turns[-1])
    assert sample.response_length == sample.tokens.size - turns[0].prompt_length
    assert sample.status is SampleStatus.COMPLETED
    told = {key: sample.metadata[key] for key in ("task", "session_id", "turns")}
    assert told == {"task": 7, "session_id": session.session_id, "turns": [0, 1, 2]}


def test_the_columns_say_of_every_sampled_token_what_the_engine_said():
    """Mask, logprob and version of each sampled token are the turn's; context tokens carry 0, 0.0 and -1."""
    session = new_session()
    turns = grow(session, "one", "two")

    [sample] = session.samples()

    context = turns[1].context_ids.size
    expected = np.concatenate([turns[0].logprobs, np.zeros(context, np.float32), turns[1].logprobs])
    is_sampled = [1] * turns[0].output_ids.size + [0] * context + [1] * turns[1].output_ids.size
    assert sample.rollout_log_probs.tobytes() == expected.tobytes()
    assert sample.loss_mask.tolist() == is_sampled
    assert sample.behavior_versions.tolist() == [0 if sampled else -1 for sampled in is_sampled]
    assert sample.proximal_logprobs.tobytes() == expected.tobytes()
    assert sample.proximal_versions.tolist() == sample.behavior_versions.tolist()


def test_versions_are_those_of_the_tokens():
    """A turn that met a weight update carries both versions, each on the tokens it sampled (I6)."""
    session = new_session()
    first = take_turn(session, [user("a")], "one", version="3")
    admission = admit(session, [user("a"), assistant("one"), user("b")])
    result = sampled(admission, "four")
    spans = (VersionSpan("3", 0, 2), VersionSpan("4", 2, result.output_ids.size))
    turn = end_turn(
        admission, output_of(structs.replace(result, version_spans=spans)), Reply(assistant("four"), TurnEnd.MODEL), 0.0
    )
    session.record(turn)

    [sample] = session.samples()

    tail = [-1] * turn.context_ids.size + [3] * 2 + [4] * (turn.output_ids.size - 2)
    assert sample.behavior_versions.tolist() == [3] * first.output_ids.size + tail
    assert sample.weight_versions == ("3", "4")


@pytest.mark.parametrize(
    ("reason", "status"), [(FinishReason.LENGTH, SampleStatus.TRUNCATED), (FinishReason.ABORT, SampleStatus.ABORTED)]
)
@pytest.mark.parametrize("incomplete", [0, 1, 2, 3])
def test_a_sample_ends_with_the_first_incomplete_turn(reason, status, incomplete):
    """What follows is dropped and counted; the incomplete turn itself is delivered and trained (I3)."""
    session = new_session(after_incomplete=AfterIncomplete.SERVE)
    turns = grow(session, "one", "two", "three", "four", incomplete=incomplete, reason=reason)

    [sample] = session.samples()

    dropped = len(turns) - 1 - incomplete
    lost = sum(turn.output_ids.size for turn in turns[incomplete + 1 :])
    assert sample.tokens.tolist() == tokens_of(session, turns[incomplete])
    assert sample.status is status
    assert sample.metadata.get("dropped_trailing_turns", 0) == dropped
    assert ("dropped_trailing_turns" in sample.metadata) == (dropped > 0)
    assert session.ledger().to_json() == {
        "generated": sum(turn.output_ids.size for turn in turns),
        "trained": sum(turn.output_ids.size for turn in turns[: incomplete + 1]),
        "masked": 0,
        "dropped": {"after_incomplete": lost} if dropped else {},
        "unknown": NONE_UNKNOWN,
    }


def test_one_selects_the_branch_with_the_most_tokens_to_train():
    """Tokens of other branches are dropped under the name of what happened to them, and none is masked for them."""
    session = new_session(selection=Selection.ONE)
    shared = take_turn(session, [user("a")], "shared")
    history = [user("a"), assistant("shared")]
    long = take_turn(session, [*history, user("b")], "a long answer")
    short = take_turn(session, [*history, user("c")], "short")

    [sample] = session.samples()

    assert (sample.metadata["turns"], sample.weight) == ([0, 1], 1.0)
    assert session.ledger() == Ledger(
        generated=sum(turn.output_ids.size for turn in [shared, long, short]),
        trained=int(sample.loss_mask.sum()),
        dropped={"other_sample": short.output_ids.size},
    )


def test_all_selects_every_branch_and_trains_a_shared_turn_once():
    """Two branches share their first turn: it is in both samples and has mask 1 in the first only."""
    session = new_session()
    shared = take_turn(session, [user("a")], "shared")
    history = [user("a"), assistant("shared")]
    left, right = (take_turn(session, [*history, user(word)], text) for word, text in [("b", "left"), ("c", "right!")])

    first, second = session.samples()

    context = [0] * left.context_ids.size
    assert [first.tokens.tolist(), second.tokens.tolist()] == [tokens_of(session, left), tokens_of(session, right)]
    assert first.loss_mask.tolist() == [1] * shared.output_ids.size + context + [1] * left.output_ids.size
    assert second.loss_mask.tolist() == [0] * shared.output_ids.size + context + [1] * right.output_ids.size
    assert second.rollout_log_probs.tolist()[: shared.output_ids.size] == shared.logprobs.tolist()
    sizes = [int(sample.loss_mask.sum()) for sample in (first, second)]
    assert [first.weight, second.weight] == [size / sum(sizes) for size in sizes]
    assert session.ledger() == Ledger(generated=sum(sizes), trained=sum(sizes))


def test_branches_that_the_merge_rule_makes_equal_are_one_sample():
    """Two continuations of a truncated turn are dropped; the turn itself is delivered once, not twice."""
    session = new_session(after_incomplete=AfterIncomplete.SERVE)
    cut = take_turn(session, [user("a")], "cut", reason=FinishReason.LENGTH)
    history = [user("a"), assistant("cut")]
    dropped = [take_turn(session, [*history, user(text)], text) for text in ("left", "right")]

    [sample] = session.samples()

    assert sample.tokens.tolist() == tokens_of(session, cut)
    assert session.ledger().to_json()["dropped"] == {"after_incomplete": sum(turn.output_ids.size for turn in dropped)}


def test_a_failed_turn_is_in_no_sample():
    """The branch of the last turn with an output is selected; a session of failures has no sample."""
    session = new_session()
    fail(session, admit(session, [user("a")]), EngineUnavailable("down"))
    assert session.samples() == []

    turn = take_turn(session, [user("a")], "one")
    fail(session, admit(session, [user("a"), assistant("one"), user("b")]), EngineUnavailable("down"))

    [sample] = session.samples()
    assert sample.tokens.tolist() == tokens_of(session, turn)


@pytest.mark.parametrize("selection", Selection)
def test_an_empty_output_is_no_sample_and_ends_none(selection):
    """An abort before the first token leaves a prompt and nothing to train: the sample before it is what it was."""
    session = new_session(selection=selection)
    take_turn(session, [user("a")], "", reason=FinishReason.ABORT)
    alone = session.samples()
    answered = take_turn(session, [user("b")])
    take_turn(session, [user("b"), answered.reply, user("c")], "", reason=FinishReason.ABORT)
    [sample] = session.samples()

    assert alone == []
    assert (sample.status, sum(sample.loss_mask)) == (SampleStatus.COMPLETED, answered.output_ids.size)


@pytest.mark.parametrize(("label", "version"), [("default", 0), ("0", 0), ("17", 17), ("007", 7)])
def test_a_policy_version_is_the_number_of_its_label(label, version):
    """SGLang's initial label counts as 0."""
    assert policy_version(label) == version


@pytest.mark.parametrize("label", ["", "-1", "v1", "1.0", " 1", "1e3", "²"])
def test_a_label_that_is_no_number_is_refused(label):
    """A version is never guessed (I6)."""
    with pytest.raises(UnknownWeightVersion):
        policy_version(label)


REASONS = st.sampled_from(list(FinishReason))
STEPS = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from(["", "x", "yes", "a longer answer"]), st.none() | REASONS),
    max_size=14,
)


def play(session: Session, steps) -> None:
    """Grow any tree: each step continues, re-samples or starts a conversation; None fails."""
    histories = [[user("root")]]
    for origin, text, reason in steps:
        messages = histories[origin % len(histories)]
        admission = admit(session, messages)
        if reason is None:
            fail(session, admission, EngineUnavailable("down"))
        else:
            finish(session, admission, text, reason=reason)
            histories.append([*messages, assistant(text), user("next")])


@given(STEPS, st.sampled_from(list(Selection)))
def test_no_token_is_lost_or_counted_twice_in_any_tree(steps, selection):
    """Generated = trained + masked + dropped, and trained is what the masks of the samples say (I4)."""
    session = new_session(selection=selection, after_incomplete=AfterIncomplete.SERVE)
    play(session, steps)

    ledger = session.ledger()
    samples = session.samples()

    ledger.check("session")
    assert ledger.trained == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert ledger.generated == sum(turn.output_ids.size for turn in session.turns)


@given(STEPS, st.sampled_from(list(Selection)))
def test_every_sample_is_a_branch_cut_at_its_first_incomplete_turn(steps, selection):
    """Its tokens are those of its last turn, all turns before that are COMPLETED, each follows its parent (I1, I3)."""
    session = new_session(selection=selection, after_incomplete=AfterIncomplete.SERVE)
    play(session, steps)
    turns = {turn.index: turn for turn in session.turns}

    for sample in session.samples():
        branch = [turns[index] for index in sample.metadata["turns"]]
        assert sample.tokens.tolist() == tokens_of(session, branch[-1])
        assert [turn.parent for turn in branch[1:]] == [turn.index for turn in branch[:-1]]
        assert branch[0].parent is None
        assert all(turn.status is TurnStatus.COMPLETED for turn in branch[:-1])
        assert {column.size for column in columns(sample)} == {sample.response_length}
        assert not sample.loss_mask[sample.behavior_versions == -1].any()
        assert not sample.rollout_log_probs[sample.behavior_versions == -1].any()


def columns(sample):
    return (
        sample.loss_mask,
        sample.rollout_log_probs,
        sample.behavior_versions,
        sample.proximal_logprobs,
        sample.proximal_versions,
    )


@pytest.mark.parametrize("forged", [-1, 1, 100])
def test_a_forged_difference_is_a_bug_that_fails_loudly(forged):
    """A ledger whose two sides differ names the session and both sides."""
    session = new_session()
    turn = take_turn(session, [user("a")], "one")

    with pytest.raises(LedgerImbalance, match=f"session x: .* leaves {forged} unaccounted"):
        account(session.turns, turn.output_ids.size + forged, session.plan()).check("session x")


def test_the_ledger_of_a_run_is_the_sum_of_its_sessions():
    ledgers = [Ledger(10, 4, 1, {"other_sample": 5}), Ledger(7, 0, 0, {"other_sample": 3, "failed_turn": 4}), Ledger()]

    assert total(ledgers) == Ledger(17, 4, 1, {"other_sample": 8, "failed_turn": 4})
