"""A history that is recognized by its bytes means what it means when it is read."""

import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.dialects.anthropic_messages_request import parse_request as parse_messages
from harness.dialects.ignored import BodyDecoder
from harness.dialects.known_beginning import BodyWithMessages, decode_body
from harness.dialects.model_request import PartlyRead, WireCall
from harness.dialects.openai_chat_request import parse_request
from harness.dialects.request_limits import RequestLimits
from harness.errors import HarnessError
from harness.tokens.history import History
from harness.tokens.matching import Matching, chain_keys, normal_form
from harness.tokens.sent_body import SentBody
from tests.thoroughness import examples

CALL = {"id": "call_0", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
LOOSE_CALL = {**CALL, "function": {"name": "find", "arguments": '{"a":1}'}}
MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "rules"},
    {"role": "user", "content": "one"},
    {"role": "user", "content": [{"type": "text", "text": "one"}]},
    {"role": "user", "content": "日本語 \n", "name": "somebody"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "content": "", "tool_calls": [LOOSE_CALL]},
    {"role": "assistant", "content": "two", "reasoning_content": "hm"},
    {"role": "assistant", "content": "two", "refusal": None},
    {"role": "tool", "tool_call_id": "call_0", "content": "three"},
    {"role": "tool", "content": "of no call"},
    {"role": "nobody", "content": "refused"},
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("find", "seek")
]
SPELLINGS: tuple[dict[str, Any], ...] = ({}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False})


@st.composite
def bodies(draw: st.DrawFn) -> list[bytes]:
    """Requests of one session: histories that grow, are spelled otherwise, branch, or get other tools.

    Some begin with the bytes of the one before and name other messages behind, which are those that count.
    """
    history: list[int] = []
    sent: list[bytes] = []
    before = ""
    for _ in range(draw(st.integers(1, 8))):
        history = history[: draw(st.integers(0, len(history)))] if draw(st.booleans()) else history
        history = history + draw(st.lists(st.integers(0, len(MESSAGES) - 1), min_size=1, max_size=3))
        # Of one spelling as a rule; messages are split, not parsed, so each may have its own.
        usual = draw(st.sampled_from(SPELLINGS))
        odd = draw(st.integers(-8, len(history) - 1))
        spelled = [
            json.dumps(MESSAGES[each], **(draw(st.sampled_from(SPELLINGS)) if place == odd else usual))
            for place, each in enumerate(history)
        ]
        tools = json.dumps(draw(st.sampled_from(([], TOOLS[:1], TOOLS))))
        begun = f"{before}], " if before and draw(st.integers(0, 3)) == 0 else f'{{"tools": {tools}, '
        before = f'{begun}"messages": [{", ".join(spelled)}'
        sent.append(f"{before}]}}".encode())
    return sent


@st.composite
def mutations(draw: st.DrawFn) -> list[bytes]:
    """The same requests, each followed by one that looks much like it and may mean something else, or nothing."""
    sent: list[bytes] = []
    for body in draw(bodies()):
        at, behind = draw(st.integers(0, len(body))), body.removesuffix(b"]}")
        message = json.dumps(draw(st.sampled_from(MESSAGES))).encode()
        odd = draw(st.sampled_from((b"", b" ", b",", b"]", b"}", b'"', b"\\", b"0", b"\xff")))
        alike = (
            body[:at] + odd + body[at + 1 :],
            body[:at] + odd + body[at:],
            body[:at],
            behind + b"," + message + b"]}",
            behind + b"\n,\t" + message + b' ] , "seed": 1}',
            behind + b"," + message + message + b"]}",
            behind + b",]}",
            behind + b'], "top_p": 2}',
            behind + b'], "top_p": 0.5, "top_p": 0.25, "odd": [{}]}',
            behind + b'], "m\\u0065ssages": [' + message + b"]}",
            behind + b'], "odd": [' + b",".join([message] * draw(st.integers(1, 3))) + b"]}",
            behind + b'], "odd": "' + message.replace(b'"', b'\\"') + b'"}',
            b'{"odd": [' + message + b"], " + body[1:],
            b'{"odd": ' + body + b", " + body[1:],
            body + body,
        )
        sent += [*([body] * draw(st.integers(1, 2))), draw(st.sampled_from(alike))]
        if draw(st.booleans()):  # what follows a body that came through
            sent.append(sent[-1].removesuffix(b"]}") + b"," + message + b"]}")
    return sent


@settings(max_examples=examples(400), deadline=None)
@given(sent=mutations())
def test_a_body_means_what_it_means_after_any_other(sent: list[bytes]):
    """Bodies that are cut, continued elsewhere, or no JSON are read, or refused, as if they came first."""
    history = History()
    for body in sent:
        assert meaning(body, history, RequestLimits()) == meaning(body, History(), RequestLimits())


def meaning(body: bytes, history: History, limits: RequestLimits) -> Any:
    """Everything that the server takes of a request, or why it refuses it."""
    try:
        request = parse_request(WireCall(body, sent=SentBody(body)), limits, history)
    except HarnessError as error:
        return type(error), error.message
    prefixes = history.read(request.messages, request.tools, request.recall)
    return tuple(request.messages), request.tools, list(prefixes), request.sampling, request.notes


@pytest.mark.parametrize(
    "matching",
    [(), *((each,) for each in Matching), tuple(Matching), ("tests.unit.dialects.test_history:first_letters",)],
    ids=str,
)
@settings(max_examples=examples(60), deadline=None)
@given(sent=bodies(), arguments_bytes=st.sampled_from((7, 8)))
def test_both_ways_come_to_the_same(matching: Sequence[str], sent: list[bytes], arguments_bytes: int):
    """Whatever was sent before; errors name the same message, and limits count what is known."""
    form = normal_form(matching)
    history = History(form)
    limits = RequestLimits(messages=6, arguments_bytes=arguments_bytes)
    for body in sent:
        fresh = meaning(body, History(form), limits)

        assert meaning(body, history, limits) == fresh

        if isinstance(fresh[0], tuple):
            messages, tools, prefixes, *_ = fresh
            assert [prefix.key for prefix in prefixes] == chain_keys(messages, tools, form)


def first_letters(message: dict[str, Any]) -> dict[str, Any]:
    """A matching of an operator's own."""
    return {"role": message["role"], "content": message.get("content", "")[:1]}


def test_what_was_sent_before_is_not_read_again():
    """Only the message behind it is."""
    history = History()
    first = {"messages": [MESSAGES[0], MESSAGES[1]], "tools": TOOLS}
    request = parse_request(WireCall(json.dumps(first).encode()), RequestLimits(), history)
    history.read(request.messages, request.tools, request.recall)

    second = first | {"messages": [*first["messages"], MESSAGES[6]], "temperature": 1}
    longer = parse_request(WireCall(json.dumps(second).encode()), RequestLimits(), history)

    assert longer.recall.known == 2
    assert longer.tools is request.tools
    assert tuple(longer.messages[:2]) == tuple(request.messages)


def test_a_body_that_begins_like_the_one_before_is_known_up_to_there():
    """By one digest, which continues to that of the whole body."""
    history = History()
    first = json.dumps({"tools": TOOLS, "messages": MESSAGES[:3]}).encode()
    begun = SentBody(first)
    request = parse_request(WireCall(first, sent=begun), RequestLimits(), history)
    history.read(request.messages, request.tools, request.recall)
    longer = json.dumps({"tools": TOOLS, "messages": [*MESSAGES[:3], MESSAGES[6]]}).encode()
    other = longer.replace(b"rules", b"ruled")

    assert history.known_bytes(SentBody(longer)) == len(first) - len("]}")
    assert history.known_bytes(SentBody(other)) == 0
    sent = SentBody(longer)
    assert parse_request(WireCall(longer, sent=sent), RequestLimits(), history).recall.known == 3
    assert sent.digest(len(longer)) == SentBody(longer).digest(len(longer))


def test_what_follows_a_known_beginning_alone_is_decoded():
    """Known messages are decoded once something looks at them."""
    history, tools = History(), json.dumps(TOOLS)
    first = f'{{"messages": [{json.dumps(MESSAGES[0])},\n {json.dumps(MESSAGES[1])}], "tools": {tools}}}'.encode()
    request = parse_request(WireCall(first, sent=SentBody(first)), RequestLimits(), history)
    history.read(request.messages, request.tools, request.recall)
    longer = first.replace(b"}]", b"}, " + json.dumps(MESSAGES[6]).encode() + b"]", 1)
    decoder: BodyDecoder[Any] = BodyDecoder(BodyWithMessages)
    call = WireCall(longer, sent=SentBody(longer))

    _, unknown, sent = decode_body(decoder, call, history)

    assert unknown == ["tools"]
    assert isinstance(sent.messages, PartlyRead)
    assert [json.loads(bytes(raw)) for raw in sent.messages] == [*MESSAGES[:2], MESSAGES[6]]
    assert sent.elements == slice(first.index(b"[") + 1, longer.index(b"]"))


def test_other_messages_behind_a_known_beginning_are_read():
    """A body may name its messages twice; the last ones count, though the first are those of the body before."""
    history = History()
    first = json.dumps({"messages": MESSAGES[:2]}).encode()
    request = parse_request(WireCall(first, sent=SentBody(first)), RequestLimits(), history)
    history.read(request.messages, request.tools, request.recall)
    others = [{**MESSAGES[0], "content": "other"}, MESSAGES[1]]
    twice = first.removesuffix(b"}") + b', "messages": ' + json.dumps(others).encode() + b"}"

    request = parse_request(WireCall(twice, sent=SentBody(twice)), RequestLimits(), history)

    assert request.recall.known == 0
    assert [message["content"] for message in request.messages] == ["other", "one"]


def test_a_client_that_never_repeats_itself_is_not_remembered_for_ever():
    """The index stays small, and continues to recognize what comes twice in a row."""
    history = History()
    for number in range(2_200):
        body = json.dumps({"messages": [{"role": "user", "content": str(number)}, MESSAGES[6]]}).encode()
        for known in (0, 2):
            request = parse_request(WireCall(body), RequestLimits(), history)
            assert request.recall.known == known
            history.read(request.messages, request.tools, request.recall)

    assert len(history) < 2_100


def test_a_client_that_goes_back_and_forth_between_two_histories_has_both_remembered():
    """What is known already is not counted twice."""
    history = History()
    sent = [
        json.dumps({"messages": [{"role": "user", "content": f"{name} {number}"} for number in range(700)]}).encode()
        for name in ("one", "two")
    ]
    known = []
    for body in sent * 3:
        request = parse_request(WireCall(body), RequestLimits(), history)
        history.read(request.messages, request.tools, request.recall)
        known.append(request.recall.known)

    assert known == [0, 0, 700, 700, 700, 700]


def test_what_is_read_as_no_message_is_counted():
    """Empty system prompts of Messages, ten thousand under another first message each time: a few of them are kept."""
    history = History()
    tracemalloc.start()
    try:
        for number in range(20):
            said = [{"role": "user", "content": str(number)}, *[{"role": "system", "content": []}] * 500]
            body = json.dumps({"messages": said}).encode()
            request = parse_messages(WireCall(body), RequestLimits(), history)
            history.read(request.messages, request.tools, request.recall)
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()

    assert parse_messages(WireCall(body), RequestLimits(), history).recall.known == 1


def test_tools_that_change_with_every_request_are_not_kept():
    """An agent writes the time into a description: a hundred sets of tools take the room of one."""
    history = History()
    tracemalloc.start()
    try:
        for number in range(100):
            tool = {"type": "function", "function": {"name": "find", "description": f"{number} " + "words " * 2_000}}
            body = json.dumps({"messages": MESSAGES[:2], "tools": [tool]}).encode()
            request = parse_request(WireCall(body), RequestLimits(), history)
            history.read(request.messages, request.tools, request.recall)
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()
