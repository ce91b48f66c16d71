"""Why a session has several roots, in one line, and what to set against it."""

from collections.abc import Callable, Sequence

import pytest

from harness.errors import EngineUnavailable
from harness.sessions.divergence import Toolset, explain_roots
from harness.sessions.session import Session, TurnRequest
from harness.sessions.turn_outcome import Reply, end_turn, lose_turn
from harness.tokens.matching import Matching
from harness.turn_ends import TurnEnd
from harness.types import Json, Message, SamplingWishes, Turn, TurnNotes, as_ids
from tests.builders import CONTEXT, assistant, new_session, output_of, sampled, tool, user

LONG = "A sentence of some length, which says nothing. " * 40
TITLE = {"role": "system", "content": "Find a title."}


def ask(
    session: Session, messages: Sequence[Message], answer: Message, *, tools: Sequence[Json] = (), fails: bool = False
) -> Turn:
    """A turn as the server takes it, with what it notes of a divergence."""
    point = session.attach(session.history.read(messages, tuple(tools)), messages)
    diverged = session.divergence(point, messages, SamplingWishes(), Toolset(tools))
    delta = tuple(messages[point.matched :])
    notes = TurnNotes(diverged={} if diverged is None else diverged.to_json())
    request = TurnRequest(delta, as_ids([7]), SamplingWishes(), "digest", tuple(tools), notes)
    admission = session.admit(point, request, CONTEXT, 1.0)
    turn = end_turn(admission, output_of(sampled(admission, "x")), Reply(answer, TurnEnd.MODEL), 2.0)
    session.record(lose_turn(turn, EngineUnavailable("down")) if fails else turn)
    return turn


def converse(rewrite: Callable[[str], str], text: str, *, turns: int = 3, matching: Sequence[str] = ()) -> Session:
    """A conversation of which the client sends back what it has made of each answer."""
    session = new_session(matching=tuple(matching))
    messages = [user("begin")]
    for number in range(turns):
        ask(session, messages, assistant(text))
        messages += [assistant(rewrite(text)), user(f"continue {number}")]
    return session


@pytest.mark.parametrize(
    ("rewrite", "remedy"),
    [
        (str.upper, "nothing matches that"),
        (lambda text: f" {text}", 'set matching = ["trimmed"]'),
        (lambda text: f"{text} \n", 'set matching = ["trimmed"]'),
        (
            lambda text: text.replace("of ", "of  "),
            'a "package.module:function" of yours in matching can overlook that',
        ),
        (lambda text: f"{text} And more.", "nothing matches that"),
        (lambda text: "", "nothing matches that"),
    ],
)
@pytest.mark.parametrize("text", ["A bit of text", LONG.strip()], ids=["short", "long"])
def test_a_client_that_rewrites_answers_is_explained(rewrite: Callable[[str], str], remedy: str, text: str):
    """With the first message of those that it rewrites; and what is said to help does."""
    session = converse(rewrite, text)

    assert explain_roots(session.turns) == f"3 roots: the client rewrites messages[1].content; {remedy}"
    if "trimmed" in remedy:
        assert explain_roots(converse(rewrite, text, matching=["trimmed"]).turns) == ""


def test_a_conversation_of_one_root_needs_no_explanation():
    """Nor does one whose prompt is asked again, or that branches behind an answer."""
    session = converse(str, "yes")
    ask(session, [user("begin")], assistant("no"))
    ask(session, [user("begin"), assistant("yes"), user("something else")], assistant("no"))

    assert explain_roots(session.turns) == explain_roots(()) == ""
    assert [turn.parent for turn in session.turns] == [None, 0, 1, None, 0]


def test_calls_that_a_client_tells_otherwise_are_explained():
    """Under ids of ours, which is what `call_ids` knows them by."""
    for matching, expected in (
        ((), '2 roots: the client rewrites messages[1].content; set matching = ["call_ids"]'),
        ((Matching.CALL_IDS,), ""),
    ):
        session = new_session(matching=matching)
        call = {"id": "call_ac53afc866cd0_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ask(session, [user("a")], {"role": "assistant", "content": "I look.", "tool_calls": [call]})
        told = assistant(f"I look.\nCalling tools:\n{[call]}")
        ask(session, [user("a"), told, user("Observation: b")], assistant("yes"))

        assert explain_roots(session.turns) == expected


def test_tools_that_change_are_explained():
    """They stand before all messages; nothing looks beyond them."""
    session = new_session()
    messages: list[Message] = [user("a")]
    for number in range(3):
        turn = ask(session, messages, assistant("yes"), tools=[tool(f"f{number}")])
        messages += [turn.reply, user("more")]

    expected = "3 roots: the tools change between calls, first in turn 1; nothing matches that"
    assert explain_roots(session.turns) == expected


def test_a_history_that_is_cut_is_explained():
    """It ends where that of the call before continues."""
    session = new_session()
    ask(session, [user("a"), assistant("b"), user("c")], assistant("d"))
    ask(session, [user("a")], assistant("e"))

    expected = "2 roots: the client leaves out messages[1] and what follows; nothing matches that"
    assert explain_roots(session.turns) == expected


def test_other_calls_do_not_count():
    """A title has another prompt: it is no split, and hides none; nor does a call that failed."""
    session = new_session()
    ask(session, [user("a")], assistant("yes"))
    ask(session, [TITLE, user("a")], assistant("A title"))
    ask(session, [user("a"), assistant("YES"), user("b")], assistant("no"), fails=True)
    ask(session, [user("a"), assistant("YES!"), user("b")], assistant("no"))

    last = session.turns[-1]
    assert (last.notes.diverged["message"], last.notes.diverged["recorded"]) == (1, "yes")
    expected = "2 roots: the client rewrites messages[1].content; nothing matches that"
    assert explain_roots(session.turns, {0, 2, 3}) == expected
    assert explain_roots(session.turns, {0, 1}) == (
        "2 roots: the client rewrites messages[0].role; nothing matches that"
    )


def test_of_several_reasons_it_is_the_one_that_comes_most_often():
    """Counted, for whoever looks at the others in the record."""
    session = converse(str.upper, "yes")
    ask(session, [user("begin")], assistant("no"), tools=[tool("f")])

    expected = "4 roots: the client rewrites messages[1].content (2 of 3 times); nothing matches that"
    assert explain_roots(session.turns) == expected
