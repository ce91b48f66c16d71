"""One conversation is one branch: what a client leaves out or spells otherwise, and what it edits.

Random agents hold conversations with two sessions at once, step by step: one gets back exactly what it said, the other
what a careless client makes of it. The tree of the first is the truth about the second.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.dialects.model_request import PartlyRead
from harness.sessions.divergence import Toolset
from harness.sessions.session import Session, TurnRequest
from harness.sessions.turn_outcome import Reply, end_turn
from harness.turn_ends import TurnEnd
from harness.types import Message, SamplingWishes, Turn, TurnNotes, as_ids
from tests.builders import CONTEXT, new_session, output_of, sampled, user

EXACT = ("exact",)
SPELLINGS = {
    "{}": ("", " \n", "null", "{ }"),
    '{"a": 1, "b": [2]}': ('{"a":1,"b":[2]}', '{"b": [2.0], "a": 1.0}', '{\n  "a": 1e0,\n  "b": [2]\n}'),
    '{"a": "é"}': (r'{"a":"\u00e9"}',),
    "no json": (),
    '{"a": NaN, "a": 2}': (),
}
"""Arguments, with other spellings of them."""


@dataclass(frozen=True)
class Step:
    """A call of a client: it continues from a conversation that it has, asks again, or edits and continues."""

    kind: Literal["continue", "ask again", "edit"]
    where: int
    """Which of its conversations."""
    at: int
    """Which of the replies in it is edited."""
    reply: Message
    """The answer that it gets, without ids."""
    choices: list[int]
    """How a careless client spells the messages."""


CALLS = st.lists(st.tuples(st.sampled_from(["f", "g"]), st.sampled_from(list(SPELLINGS))), max_size=2)


def reply_of(content: str, reasoning: str, calls: Sequence[tuple[str, str]]) -> Message:
    """A reply as the server makes it, its calls without ids."""
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": made} if made else {})


REPLIES = st.builds(reply_of, st.sampled_from(["", "yes", "yes\n", "no"]), st.sampled_from(["", "hm", "so"]), CALLS)
NUMBER = st.integers(0, 1_000)
STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["continue", "continue", "continue", "ask again", "edit"]),
        NUMBER,
        NUMBER,
        REPLIES,
        st.lists(NUMBER, min_size=4, max_size=4),
    ),
    min_size=1,
    max_size=14,
)


def request(session: Session, messages: Sequence[Message], reply: Message, *, prefix: str = "") -> Turn:
    """A turn with that answer, delivered; `prefix` is put before its content."""
    point = session.attach(session.history.read(messages, ()), messages)
    notes = TurnNotes(ambiguous=point.others)
    delta = tuple(messages[point.matched :])
    about = TurnRequest(delta, as_ids([7] * len(delta)), SamplingWishes(), str(len(session.turns)), notes=notes)
    admission = session.admit(point, about, CONTEXT, 1.0)
    message = dict(reply)
    if prefix and not reply.get("tool_calls"):
        message["content"] = prefix + (reply["content"] or "")
    if calls := message.get("tool_calls"):
        place = f"call_{admission.key.hex()[:12]}{admission.ordinal}_"
        message["tool_calls"] = [{"id": f"{place}{i}", **call} for i, call in enumerate(calls)]
    session.record(end_turn(admission, output_of(sampled(admission, "x")), Reply(message, TurnEnd.MODEL), 2.0))
    return session.mark_delivered(admission.index)


def results(message: Message, number: int) -> list[Message]:
    """What comes behind a reply: the results of its calls, and something new from the user."""
    made = message.get("tool_calls") or ()
    return [
        *({"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in made),
        user(f"continue {number}"),
    ]


@dataclass
class Client:
    """A client of one session, which may be careless about what it sends back."""

    session: Session
    spell: Callable[[Message, int], Message] = lambda message, choice: message
    rename: Callable[[str], str] = str
    is_telling: bool = False
    """Each reply has words of its own."""
    conversations: list[list[Message]] = field(default_factory=lambda: [[user("begin")]])

    def take(self, step: Step, number: int) -> None:
        """One step; its conversations are of what it was really told."""
        before = list(self.conversations[step.where % len(self.conversations)])
        replies = [i for i, message in enumerate(before) if message["role"] == "assistant"]
        if step.kind == "ask again" and replies and replies[-1] == len(before) - 1:
            before.pop()
        elif step.kind == "edit" and replies:
            at = replies[step.at % len(replies)]
            # Without reasoning: of its own words, too, a client must not say more than it did at first.
            edited = {"role": "assistant", "content": f"edited {number}"}
            before = [*before[:at], edited, user(f"so {number}")]
        elif replies and replies[-1] == len(before) - 1:
            before += results(before[-1], number)
        sent = [self.send(message, step.choices[i % 4]) for i, message in enumerate(before)]
        turn = request(self.session, sent, step.reply, prefix=f"{number} " if self.is_telling else "")
        self.conversations.append([*before, turn.reply])

    def send(self, message: Message, choice: int) -> Message:
        """The message as it goes over the wire."""
        if message["role"] == "tool":
            return message | {"tool_call_id": self.rename(message["tool_call_id"])}
        if message["role"] != "assistant":
            return message
        calls = [call | {"id": self.rename(call["id"])} for call in message.get("tool_calls") or ()]
        return self.spell(message | ({"tool_calls": calls} if calls else {}), choice)

    @property
    def turns(self) -> Sequence[Turn]:
        return self.session.turns


def spell_carelessly(message: Message, choice: int) -> Message:
    """The message in one of the ways that say the same."""
    sent = dict(message)
    reasoning = sent.pop("reasoning_content", None)
    if reasoning is not None and choice % 4:
        sent["reasoning_content"] = (None, reasoning, f" {reasoning}\n", "")[choice % 4]
    if calls := sent.get("tool_calls"):
        sent["tool_calls"] = [respell(call, choice) for call in calls]
        sent["content"] = (sent["content"], "", None)[choice % 3]
    else:
        sent["content"] = (sent["content"] or "") + "\n" * (choice % 3)
    return sent


def respell(call: Message, choice: int) -> Message:
    """The call with its arguments in another spelling."""
    function = call["function"]
    spellings = (function["arguments"], *SPELLINGS[function["arguments"]])
    return call | {"function": function | {"arguments": spellings[choice % len(spellings)]}}


def parents(turns: Iterable[Turn]) -> list[int | None]:
    return [turn.parent for turn in turns]


@settings(deadline=None)
@given(steps=STEPS)
def test_exact_and_default_matching_give_the_same_tree(steps: list[Step]):
    """To a client that sends back what it got, whatever it asks again or edits."""
    exact, default = Client(new_session(matching=EXACT)), Client(new_session())
    for number, step in enumerate(steps):
        for client in (exact, default):
            client.take(step, number)

    assert parents(default.turns) == parents(exact.turns)


@settings(deadline=None)
@given(steps=STEPS, renames=st.booleans(), is_telling=st.booleans())
def test_a_careless_client_has_the_tree_of_a_faithful_one(steps: list[Step], renames: bool, is_telling: bool):
    """Also one that alternates; but for replies that it does not tell apart, which the record names."""
    rename = (lambda call_id: f"mine_{call_id[5:]}") if renames else str
    faithful = Client(new_session(), is_telling=is_telling)
    careless = Client(new_session(), spell_carelessly, rename, is_telling)
    for number, step in enumerate(steps):
        for client in (faithful, careless):
            client.take(step, number)

    for true, found in zip(faithful.turns, careless.turns, strict=True):
        way = [true.index, *(turn.index for turn in faithful.session.branch(true.parent))]
        doubts = [careless.session.turn(index).notes.ambiguous for index in way]
        assert found.parent == true.parent or any(doubts)
        if found.parent != true.parent and doubts[0]:
            assert true.parent in doubts[0] or any(doubts[1:])
    if is_telling and not any(step.reply.get("tool_calls") for step in steps):
        assert parents(careless.turns) == parents(faithful.turns)


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "other content": lambda said: said.update(content="I looked."),
    "other reasoning": lambda said: said.update(reasoning_content="hm, no"),
    "other arguments": lambda said: said["tool_calls"][0]["function"].update(arguments='{"a": 2}'),
    "other function": lambda said: said["tool_calls"][0]["function"].update(name="h"),
    "other order": lambda said: said["tool_calls"].reverse(),
    "a call less": lambda said: said["tool_calls"].pop(),
    "a call more": lambda said: said["tool_calls"].append(said["tool_calls"][0] | {"id": "mine"}),
    "no calls": lambda said: said.pop("tool_calls"),
    "ids of each other": lambda said: [
        call.update(id=other["id"]) for call, other in zip(said["tool_calls"], said["tool_calls"][::-1], strict=True)
    ],
    "a field more": lambda said: said.update(redacted_thinking=["data"]),
}


@pytest.mark.parametrize("at", [1, 5, 9])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_a_branch(edit: str, at: int):
    """Where it stands, whether or not the rest is sent back as it was; and the record says what was edited."""
    session = new_session()
    reply = reply_of("I look.", "hm", [("f", '{"a": 1, "b": [2]}'), ("g", "{}")])
    messages: list[Message] = [user("begin")]
    for number in range(3):
        turn = request(session, messages, reply)
        messages += [turn.reply, *results(turn.reply, number)]
    edited = json.loads(json.dumps(messages[at]))
    EDITS[edit](edited)
    sent = [*messages[:at], edited, *messages[at + 1 :]]

    point = session.attach(session.history.read(sent, ()), sent)

    assert (point.parent, point.matched) == ((None, 0) if at == 1 else ((at - 5) // 4, at - 3))
    diverged = session.divergence(point, sent, SamplingWishes(), Toolset())
    assert diverged is not None
    assert diverged.message == at


@pytest.mark.parametrize(("delivered", "parent"), [((0, 1), 1), ((1, 0), 0), ((0,), 0), ((), 1)])
def test_of_two_that_fit_it_is_the_one_delivered_last(delivered: tuple[int, ...], parent: int):
    """The answer that the client has seen; then the one that was admitted last. It names the others."""
    session = new_session()
    for reasoning in ("hm", "so"):
        request(session, [user("a")], reply_of("yes", reasoning, []))
    for index in (0, 1):
        session.mark_delivered(index, delivered=False)
    for index in delivered:
        session.mark_delivered(index)
    sent = [user("a"), {"role": "assistant", "content": "yes"}, user("b")]

    point = session.attach(session.history.read(sent, ()), sent)

    assert (point.parent, point.others) == (parent, (1 - parent,))


def test_after_a_restart_a_delivered_answer_goes_before_one_that_was_not():
    """What came last is forgotten; then it is the one admitted last."""
    session, sent = new_session(), [user("a"), {"role": "assistant", "content": "yes"}, user("b")]
    for reasoning in ("hm", "so", "oh"):
        request(session, [user("a")], reply_of("yes", reasoning, []))
    session.mark_delivered(2, delivered=False)
    session.mark_delivered(0)
    twin = new_session()
    for turn in session.turns:
        twin.restore(turn)

    found = [each.attach(each.history.read(sent, ()), sent) for each in (session, twin)]

    assert [(point.parent, point.others) for point in found] == [(0, (1, 2)), (1, (0, 2))]


def test_of_two_that_fit_it_is_the_one_that_says_it_alike():
    """One of them thought and one did not: a client that sends no reasoning back may have been told none."""
    session = new_session()
    for reasoning in ("", "hm"):
        request(session, [user("a")], reply_of("yes", reasoning, []))
    sent = [user("a"), {"role": "assistant", "content": "yes"}, user("b")]

    point = session.attach(session.history.read(sent, ()), sent)

    assert (point.parent, point.others) == (0, (1,))


@pytest.mark.parametrize("says_ids", [True, False])
def test_ids_of_calls_decide_between_two_that_fit(says_ids: bool):
    """Ours; under ids of its own a client says nothing of that."""
    session = new_session()
    first, _ = (request(session, [user("a")], reply_of("", thought, [("f", "{}")])) for thought in ("hm", "so"))
    sent = [user("a"), dict(first.reply), *results(first.reply, 0)]
    del sent[1]["reasoning_content"]
    if not says_ids:
        sent[1]["tool_calls"] = [call | {"id": "mine"} for call in sent[1]["tool_calls"]]

    point = session.attach(session.history.read(sent, ()), sent)

    assert (point.parent, point.others) == ((0, ()) if says_ids else (1, (0,)))


def test_a_reply_of_the_client_s_own_is_what_it_said_first():
    """It may say less of it later, and not more."""
    session = new_session()
    least, most = reply_of("yes", "", []), reply_of("yes", "hm", [])
    for begin in ("a", "b"):
        first = most if begin == "a" else least
        turn = request(session, [user(begin), first, user("so?")], reply_of("no", "", []))
        for sent in (least, most):
            request(session, [user(begin), sent, user("so?"), turn.reply, user("more")], reply_of("done", "", []))

    assert parents(session.turns) == [None, 0, 0, None, 3, None]


def test_ids_that_a_client_uses_twice_are_no_error():
    session = new_session()
    messages: list[Message] = [user("a")]
    for number in range(4):
        turn = request(session, messages, reply_of("", "hm", [("f", "{}")]))
        call = turn.reply["tool_calls"][0] | {"id": "call_0"}
        messages += [{**turn.reply, "tool_calls": [call]}, *results({"tool_calls": [call]}, number)]

    assert parents(session.turns) == [None, 0, 1, 2]


def test_a_request_compares_what_is_new_in_it():
    """Two histories alike, edited near their beginning, of a client that drops reasoning (I11).

    Each was read before, and of each request no more than the last reply is read again.
    """
    session, read = new_session(), list[int]()
    ways: list[list[Message]] = [[user("begin")], [user("begin")]]
    for number in range(60):
        for way, messages in enumerate(ways):
            prefixes = session.history.read(messages, ())
            known = len(messages) - 1 if number else 0
            partly = PartlyRead(known, tuple(messages[known:]), lambda at, sent=messages: read.append(at) or sent[at])
            read.clear()
            point = session.attach(prefixes, partly)
            assert set(read) <= {len(messages) - 2, len(messages) - 3}
            assert len(read) <= 4
            assert point.parent == (None if number == 0 else 2 * number - 2 + way)
            turn = request(session, messages, reply_of("yes", "hm" if number else f"hm {way}", []))
            messages += [turn.reply if number == 0 else {"role": "assistant", "content": "yes"}, user("more")]


def test_what_was_compared_is_not_kept_for_ever():
    """A client that sends another edited history each time, and counts its tokens."""
    session, reply = new_session(), reply_of("yes", "hm", [])
    messages: list[Message] = [user("begin")]
    for _ in range(20):
        turn = request(session, messages, reply)
        messages += [turn.reply, user("more")]
    for number in range(1_000):
        sent = [messages[0], {**messages[1], "reasoning_content": str(number)}, *messages[2:]]
        assert session.attach(session.history.read(sent, ()), sent).parent is None

    assert len(session._tree._differences) < 5_000
    assert session.attach(session.history.read(messages, ()), messages).parent == 19
