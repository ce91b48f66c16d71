"""A request whose beginning is recalled, in every dialect: it means what it means when all of it is read."""

import gc
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from types import FrameType
from typing import Any

import pytest
from msgspec import structs

from harness.dialects.dialect import DIALECTS, Dialect
from harness.dialects.model_request import ModelRequest, WireCall, seal
from harness.dialects.request_limits import DEFAULT_LIMITS
from harness.errors import MalformedRequest
from harness.tokens.history import History
from harness.tokens.matching import chain_keys
from harness.types import Json
from tests.builders import new_session, take_turn, user

BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
CHAT, MESSAGES, RESPONSES = (BY_NAME[name] for name in ("openai_chat", "anthropic_messages", "openai_responses"))


def read(dialect: Dialect, history: History, **fields: Any) -> ModelRequest:
    """A request to a session with that history, which remembers it."""
    asked = dialect.parse(WireCall(json.dumps(fields).encode()), DEFAULT_LIMITS, history)
    history.read(asked.messages, asked.tools, asked.recall)
    return asked


def uses(*call_ids: str) -> Json:
    """A reply of tool calls."""
    blocks = [{"type": "tool_use", "id": call_id, "name": "add", "input": {}} for call_id in call_ids]
    return {"role": "assistant", "content": blocks}


def results(*call_ids: str) -> Json:
    """A message of results."""
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id} for call_id in call_ids]}


def steps_of(work: Callable[[], object]) -> int:
    """How many instructions of Python `work` takes."""
    steps = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        del argument
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return count

    before = sys.gettrace()
    gc.disable()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return steps


def test_many_results_in_one_message_are_read_again_once():
    """Twice as many take twice the work, not four times."""

    def steps(count: int) -> int:
        history = History()
        messages = [user("hi"), uses("c1"), results(*["c1"] * count)]
        read(MESSAGES, history, messages=messages)
        asked = read(MESSAGES, history, messages=messages)
        assert asked.recall.known == 2 + count
        return steps_of(lambda: asked.messages[:])

    steps(1)  # the first call reads what later ones find
    assert steps(200) < 2.5 * steps(100)


def test_many_items_of_one_reply_are_grouped_in_one_go():
    """Twice as many take twice the work."""

    def steps(count: int) -> int:
        call = WireCall(json.dumps({"input": [{"type": "reasoning"}] * count}).encode())
        return steps_of(lambda: RESPONSES.parse(call, DEFAULT_LIMITS, History()))

    steps(1)  # the first call reads what later ones find
    assert steps(200) < 2.5 * steps(100)


ALTERNATING = [user("hi"), {"role": "assistant", "content": "ho"}] * 50
SPEAKING = [{"type": "text", "text": "hi"}] * 50
MANY: dict[str, Json] = {
    "openai_chat": {"messages": ALTERNATING},
    "anthropic_messages": {"messages": ALTERNATING},
    "anthropic_messages, blocks": {"messages": [{**each, "content": SPEAKING} for each in ALTERNATING[:2]]},
    "openai_responses": {"input": ALTERNATING},
    "openai_responses, items": {"input": [{"type": "reasoning", "summary": []}] * 100},
    "gemini": {"contents": [{"role": role, "parts": [{"text": "hi"}]} for role in ("user", "model") * 50]},
    "gemini, parts": {"contents": [{"role": role, "parts": [{"text": "hi"}] * 50} for role in ("user", "model")]},
}


@pytest.mark.parametrize("many", MANY)
def test_a_thread_may_rest_between_any_two_messages_and_parts_of_them(many: str):
    """Otherwise the event loop waits for the interpreter as long as a large body is read."""
    passed: list[object] = []

    def paced(items: Iterable[Any]) -> Iterator[Any]:
        for each in items:
            passed.append(each)
            yield each

    call = WireCall(json.dumps(MANY[many]).encode(), paced=paced)

    asked = BY_NAME[many.partition(",")[0]].parse(call, DEFAULT_LIMITS, History())
    while_parsed = len(passed)
    History().read(asked.messages, asked.tools, paced=paced)

    assert while_parsed >= 100
    assert len(passed) == while_parsed + len(asked.messages)


@pytest.mark.parametrize(("before", "now"), list(itertools.permutations(BY_NAME, 2)))
def test_the_same_bytes_in_another_dialect_are_no_acquaintances(before: str, now: str):
    """A body that means something in each, and something else."""
    two_in_one = {"type": "function", "name": "add", "function": {"name": "subtract"}}
    said = {"messages": [user("hi")], "input": [user("hi")], "contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
    fields: Json = {**said, "tools": [two_in_one]}
    history = History()
    read(BY_NAME[before], history, **fields)

    asked = read(BY_NAME[now], history, **fields)

    assert asked.recall.known == 0
    assert asked.tools == read(BY_NAME[now], History(), **fields).tools


def test_a_role_is_not_mistaken_for_replies():
    """Whatever a client calls itself, the session does not take it for somebody else's history."""
    odd = [user("hi"), {"role": 'assistant,"a"', "content": "b"}]
    usual = [user("hi"), {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    for first, second in itertools.permutations((odd, usual)):
        history = History()
        read(MESSAGES, history, messages=first)

        asked = read(MESSAGES, history, messages=second)
        keys = [prefix.key for prefix in history.read(asked.messages, asked.tools, asked.recall)]

        assert keys == chain_keys(asked.messages, ())


def calls(*call_ids: str, role: str = "assistant") -> Json:
    """A message of Chat Completions with calls."""
    made = [{"id": call_id, "type": "function", "function": {"name": "add"}} for call_id in call_ids]
    return {"role": role, "content": "", "tool_calls": made}


def answers(call_id: str) -> Json:
    """A result of Chat Completions."""
    return {"role": "tool", "tool_call_id": call_id, "content": "5"}


@pytest.mark.parametrize(
    ("dialect", "messages", "is_served"),
    [
        (MESSAGES, [user("hi"), uses("c1"), results("c1"), uses("c1"), results("c1")], True),
        (MESSAGES, [user("hi"), uses("c1"), results("c1"), uses("c2", "c2"), results("c2")], False),
        (MESSAGES, [user("hi"), uses("c1"), uses("c1"), results("c1")], False),
        (MESSAGES, [user("hi"), uses("c1", "c2"), results("c1"), user("and?"), results("c2")], True),
        (MESSAGES, [user("hi"), uses("c1"), results("c1"), results("c2")], True),
        (MESSAGES, [user("hi"), results("c2"), uses("c2")], True),
        (CHAT, [user("hi"), calls("c1"), answers("c1"), calls("c1"), answers("c1")], True),
        (CHAT, [user("hi"), calls("c1", "c2"), answers("c2"), user("and?"), answers("c1")], True),
        (CHAT, [user("hi"), calls("", ""), answers("c1"), answers("c2")], True),
        (CHAT, [user("hi"), calls("c1", "c1"), answers("c1")], False),
        (CHAT, [user("hi"), calls("c1"), answers("c1"), answers("c2")], True),
        (CHAT, [user("hi"), answers("c1"), calls("c1")], True),
        (CHAT, [calls("c1", role="user"), answers("c1")], True),
    ],
)
def test_ids_of_calls_are_judged_alike_however_much_is_recalled(
    dialect: Dialect, messages: list[Json], is_served: bool
):
    """A server that has read the beginning of a history says what one says that reads all of it.

    In Chat Completions a result is a message of its own, and a call may have no id.
    """
    for known in range(len(messages)):
        history = History()
        with suppress(MalformedRequest):
            read(dialect, history, messages=messages[:known])
        with nullcontext() if is_served else pytest.raises(MalformedRequest):
            read(dialect, history, messages=messages)


@pytest.mark.parametrize(
    ("item", "reasoning"),
    [
        ({"content": [{"type": "reasoning_text", "text": "as it was sampled"}]}, "as it was sampled"),
        ({"encrypted_content": seal("r1"), "summary": [{"type": "summary_text", "text": "in short"}]}, "as recorded"),
        ({"encrypted_content": seal("r2"), "summary": [{"type": "summary_text", "text": "in short"}]}, "in short"),
    ],
)
def test_a_summary_is_taken_where_the_reasoning_is_not_known(item: Json, reasoning: str):
    """It is no text that the model has sampled: the key of the reply comes first."""
    reply = {"role": "assistant", "content": "yes", "reasoning_content": "as recorded"}
    turn = structs.replace(take_turn(new_session(), [user("hi")]), reply=reply)
    body = json.dumps({"input": [user("hi"), {"type": "reasoning", "summary": [], **item}]}).encode()

    asked = RESPONSES.parse(WireCall(body, answered_as={"r1": turn}.get), DEFAULT_LIMITS, History())

    assert asked.messages[1]["reasoning_content"] == reasoning


def test_tools_that_only_the_vendor_runs_are_noted_in_every_turn():
    """Also where the tools are recalled."""
    history = History()
    tools = [{"name": "add", "input_schema": {}}, {"type": "web_search_20250305", "name": "web_search"}]
    asked = [read(MESSAGES, history, messages=[user("hi"), user("so?")][:n], tools=tools) for n in (1, 2)]

    assert [each.recall.known for each in asked] == [0, 1]
    assert [each.notes.left_out for each in asked] == [("web_search",)] * 2
