"""Where a request joins the tree of turns, and that nothing in the tree is ever rewritten."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import BranchEnded, EngineUnavailable, PromptTooLong
from harness.sessions.session_config import AfterIncomplete
from harness.sessions.token_log import TokenPath
from harness.sessions.turn_outcome import lose_turn
from harness.tokens.matching import chain_keys, next_key
from harness.turn_ends import TurnStatus
from harness.types import FinishReason, as_ids
from tests.builders import admit, assistant, fail, finish, new_session, prompt_of, take_turn, tokens_of, tool, user
from tests.session_servers.store_file import NONE_UNKNOWN


def test_a_request_attaches_to_the_deepest_turn_it_continues():
    """With turns 0 and 1 on a line, a request that replays both extends turn 1, and only the new message is new."""
    session = new_session()
    take_turn(session, [user("a")], "1")
    take_turn(session, [user("a"), assistant("1"), user("b")], "2")

    third = admit(session, [user("a"), assistant("1"), user("b"), assistant("2"), user("c")])

    assert (third.parent, third.request.messages_delta) == (1, (user("c"),))


@pytest.mark.parametrize(
    "messages",
    [
        [user("A"), assistant("1"), user("b")],
        [assistant("1"), user("a"), user("b")],
        [user("a"), {**assistant("1"), "redacted_thinking": ["data"]}, user("b")],
        [user("a"), assistant("1 "), user("b")],
        [{"role": "system", "content": "s"}, user("a"), assistant("1"), user("b")],
    ],
    ids=["first message", "order", "another field", "whitespace", "system message"],
)
def test_a_conversation_that_begins_differently_is_a_new_root(messages):
    """Whatever precedes the known answer has to be the same, to the letter."""
    session = new_session()
    take_turn(session, [user("a")], "1")

    assert admit(session, messages).parent is None


def test_other_tools_make_a_new_root():
    """Tools stand at the start of the prompt, so another list of them is another prompt."""
    session = new_session()
    take_turn(session, [user("a")], "1", tools=[tool("add")])

    other = admit(session, [user("a"), assistant("1"), user("b")], tools=[tool("add"), tool("subtract")])
    same = admit(session, [user("a"), assistant("1"), user("b")], tools=[tool("add")])

    assert (other.parent, same.parent) == (None, 0)


def test_a_resample_is_a_sibling():
    """The same request again starts beside the first turn; both grow on without touching each other."""
    session = new_session()
    take_turn(session, [user("a")], "1")
    history = [user("a"), assistant("1"), user("b")]
    left, right = take_turn(session, history, "left"), take_turn(session, history, "right")

    left_child = admit(session, [*history, assistant("left"), user("c")])
    right_child = admit(session, [*history, assistant("right"), user("c")])

    assert [left.parent, right.parent, left_child.parent, right_child.parent] == [0, 0, 1, 2]
    assert left_child.prompt_ids.tolist()[: len(tokens_of(session, left))] == tokens_of(session, left)
    assert right_child.prompt_ids.tolist()[: len(tokens_of(session, right))] == tokens_of(session, right)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_equal_resamples_count_as_the_one_admitted_last(order):
    """Whichever of two equal answers comes to its end first: a restart, which reads them in order, must agree."""
    session = new_session()
    admissions = [admit(session, [user("a")]), admit(session, [user("a")])]
    for index in order:
        finish(session, admissions[index], "same")

    assert admit(session, [user("a"), assistant("same"), user("b")]).parent == 1


def test_a_failed_turn_is_no_place_to_attach():
    """A turn without an output has no answer that a client could send back."""
    session = new_session()
    fail(session, admit(session, [user("a")]), EngineUnavailable("down"))

    request = admit(session, [user("a"), {"role": "assistant", "content": ""}, user("b")])

    assert (request.parent, session.turns[0].status) == (None, TurnStatus.FAILED)


def test_a_turn_in_flight_is_no_place_to_attach():
    session = new_session()
    admit(session, [user("a")])

    assert admit(session, [user("a"), assistant("guessed"), user("b")]).parent is None


def test_a_turn_that_was_lost_can_be_asked_again_and_not_extended():
    """A turn the store could not keep leaves its tokens in the ledger and nothing to build on (I9)."""
    session = new_session()
    admission = admit(session, [user("a")])
    turn = take_turn(new_session(), [user("a")], "1")

    session.record(lose_turn(turn, EngineUnavailable("disk")))

    assert admission.index == turn.index
    assert admit(session, [user("a"), assistant("1"), user("b")]).parent is None
    assert session.ledger().to_json() == {
        "generated": turn.output_ids.size,
        "trained": 0,
        "masked": 0,
        "dropped": {"failed_turn": turn.output_ids.size},
        "unknown": NONE_UNKNOWN,
    }


def test_a_failed_sibling_leaves_the_other_one_intact():
    """Two siblings share their parent's tokens; the failure of the one that grew in place harms neither."""
    session = new_session()
    parent = take_turn(session, [user("a")], "1")
    history = [user("a"), assistant("1"), user("b")]
    first, second = admit(session, history), admit(session, history)
    expected = first.prompt_ids.tolist()

    fail(session, first, EngineUnavailable("down"))
    survivor = finish(session, second, "2")
    retry = take_turn(session, history, "3")
    child = admit(session, [*history, assistant("2"), user("c")])

    assert prompt_of(session, survivor) == prompt_of(session, retry) == expected
    assert child.prompt_ids.tolist()[: len(tokens_of(session, survivor))] == tokens_of(session, survivor)
    assert tokens_of(session, parent) == expected[: len(tokens_of(session, parent))]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_a_branch_that_ended_incomplete_is_not_extended(reason):
    """Those tokens could never be trained; the same prompt may be asked again all the same."""
    session = new_session()
    take_turn(session, [user("a")], "1", reason=reason)

    with pytest.raises(BranchEnded):
        admit(session, [user("a"), assistant("1"), user("b")])

    assert admit(session, [user("a")]).parent is None


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_serve_extends_an_incomplete_branch(reason):
    """An evaluation continues; the merge rule drops and counts the tail."""
    session = new_session(after_incomplete=AfterIncomplete.SERVE)
    take_turn(session, [user("a")], "1", reason=reason)

    assert admit(session, [user("a"), assistant("1"), user("b")]).parent == 0


def test_a_prompt_that_is_too_long_changes_nothing():
    """Neither the tree nor the count of turns nor what is in flight."""
    session = new_session()
    first = take_turn(session, [user("a")], "1")

    with pytest.raises(PromptTooLong):
        admit(session, [user("a"), assistant("1"), user("x" * 100)], context_length=50)

    assert (session.turns, session.turns_in_flight) == ([first], [])
    assert admit(session, [user("a"), assistant("1"), user("b")]).index == 1


def test_restored_turns_make_the_same_session():
    """A session read back in order of admission attaches, counts and numbers like the one that was lost (I9)."""
    session = new_session()
    history = [user("a"), assistant("1"), user("b")]
    take_turn(session, [user("a")], "1")
    take_turn(session, history, "2")
    take_turn(session, history, "2")
    twin = new_session()
    for turn in session.turns:
        twin.restore(turn)

    grown = [admit(each, [*history, assistant("2"), user("c")]) for each in (session, twin)]

    assert grown[0].prompt_ids.tolist() == grown[1].prompt_ids.tolist()
    assert (grown[0].index, grown[0].parent, grown[0].ordinal) == (grown[1].index, grown[1].parent, grown[1].ordinal)
    assert (twin.ledger(), twin.turns) == (session.ledger(), session.turns)


def test_a_snapshot_stays_as_it_was():
    """A reader in another thread sees one moment: turns, ledger and what is in flight belong together."""
    session = new_session()
    first = take_turn(session, [user("a")], "1")
    in_flight = admit(session, [user("b")])
    snapshot = session.snapshot()

    finish(session, in_flight, "2")
    session.mark_delivered(0)
    session.drain()

    assert (snapshot.turns, [each.index for each in snapshot.turns_in_flight]) == ([first], [1])
    assert (snapshot.phase, snapshot.ledger().generated) == ("open", first.output_ids.size)
    snapshot.ledger().check("snapshot")


@pytest.mark.parametrize(
    "replayed",
    [
        {"role": "assistant", "content": "1"},
        {"role": "assistant", "content": "1", "tool_calls": []},
        {"role": "assistant", "content": "1", "tool_calls": None, "refusal": None},
        {"content": "1", "role": "assistant"},
    ],
    ids=["as served", "empty tool calls", "None", "order of keys"],
)
def test_values_that_say_nothing_do_not_make_another_message(replayed):
    """None, an empty text and an empty list are the same as nothing."""
    session = new_session()
    take_turn(session, [user("a")], "1")

    assert admit(session, [user("a"), replayed, user("b")]).parent == 0


def test_the_key_of_a_conversation_is_that_of_its_parts():
    """Extending a key message by message gives the key of the whole; every prefix has a key of its own."""
    messages = [user("a"), assistant("b"), user("c")]

    keys = chain_keys(messages, [tool()])

    assert keys[1:] == [next_key(key, message) for key, message in zip(keys, messages, strict=False)]
    assert len(set(keys)) == len(keys) == 4


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 258), max_size=40)), max_size=40))
def test_paths_never_change_whatever_grows_beside_them(growths):
    """Any tree of appends over shared memory reads as if each path had been copied."""
    paths = [(TokenPath.empty(), ())]
    for origin, ids in growths:
        path, expected = paths[origin % len(paths)]
        paths.append((path.extend(as_ids(ids)), expected + tuple(ids)))

    assert [tuple(path.ids.tolist()) for path, _ in paths] == [expected for _, expected in paths]


def test_a_long_branch_is_not_copied_for_each_turn():
    """A branch that only grows keeps one array: all its prompts are views of few buffers (I11)."""
    path = TokenPath.empty()
    views = []
    for _ in range(1_000):
        path = path.extend(as_ids(range(10)))
        views.append(path.ids)

    assert len({id(view.base) for view in views}) < 12
    assert not any(view.flags.writeable for view in views)
    assert np.array_equal(views[-1][:10], views[0])
