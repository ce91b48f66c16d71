"""The Responses dialect: what clients really send is understood, everything else is refused by name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from harness.dialects.model_request import ModelAnswer, ModelRequest, ToolMode, WireCall
from harness.dialects.openai_responses import OpenAIResponses
from harness.dialects.openai_responses_request import parse_request
from harness.dialects.request_limits import DEFAULT_LIMITS
from harness.errors import PreviousResponseNotFound, RequestError
from harness.tokens.history import History
from harness.tokens.matching import EXACT
from harness.tokens.parsing import tool_call
from harness.turn_ends import TurnEnd
from harness.types import Json, SamplingWishes, Turn, TurnNotes
from tests.builders import assistant, new_session, take_turn, tool, toy_tokenizer, user

RESPONSE_ID = "a" * 32
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
}
CALENDAR = {"type": "namespace", "name": "calendar", "description": "Dates.", "tools": [{**ADD, "name": "list"}, PATCH]}
SHELL = {"type": "local_shell"}
TOOLS = [ADD, PATCH, CALENDAR, SHELL]


def ask(items: Any, recorded: ModelAnswer | None = None, **fields: Any) -> ModelRequest:
    """The request with these input items, in a session that has recorded that answer."""
    turns = {} if recorded is None else {recorded.response_id: recorded.turn}
    return parse_request(WireCall(json.dumps({"input": items, **fields}).encode(), answered_as=turns.get))


def refusal(items: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ask(items, **fields)
    return caught.value


def answered(reply: Json, **changes: Any) -> ModelAnswer:
    """An answer with that reply, to a request with all kinds of tools."""
    asked = ask("hi", tools=TOOLS)
    session = new_session()
    notes = structs.replace(asked.notes, response_id=RESPONSE_ID)
    turn = structs.replace(take_turn(session, [user("hi")]), reply=reply, notes=notes, **changes)
    return ModelAnswer(asked, turn, "m", toy_tokenizer().token_text)


def calls_of(*calls: tuple[str, str]) -> list[Json]:
    """Calls of a reply, as they are recorded."""
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]


def test_a_minimal_request_asks_for_nothing():
    """A text, and not even a model."""
    asked = ask("hi")

    assert (asked.messages, asked.tools, asked.tool_mode) == ((user("hi"),), (), ToolMode.AUTO)
    assert (asked.sampling, asked.model, asked.streaming, asked.notes) == (SamplingWishes(), "", None, TurnNotes())


def test_what_codex_sends_is_understood():
    """Instructions, a developer's and two users' messages, its own reply without ids and reasoning, the results."""
    reply = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": calls_of(("add", '{"a": 1}'), ("apply_patch", '{"input": "*** Begin Patch"}')),
    }
    recorded = answered(reply)
    items = OpenAIResponses().answer(recorded)["output"]
    sent = [{name: value for name, value in item.items() if name not in ("id", "content")} for item in items[:1]]
    sent += [{name: value for name, value in item.items() if name != "id"} for item in items[1:]]
    asked = ask(
        [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "context"}]},
            {"role": "user", "content": "go"},
            *sent,
            {"type": "function_call_output", "call_id": "call_0", "output": "2"},
            {
                "type": "custom_tool_call_output",
                "call_id": "call_1",
                "output": [{"type": "input_text", "text": "do"}, {"type": "input_text", "text": "ne"}],
            },
        ],
        recorded,
        instructions="You are Codex.",
        tools=[*TOOLS, {"type": "web_search", "external_web_access": False}],
        parallel_tool_calls=False,
        reasoning={"effort": "high", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0199",
        text={"verbosity": "low"},
    )

    assert list(asked.messages) == [
        {"role": "system", "content": "You are Codex."},
        {"role": "developer", "content": "rules"},
        user("context"),
        user("go"),
        reply,
        {"role": "tool", "tool_call_id": "call_0", "content": "2"},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    assert [each["function"]["name"] for each in asked.tools] == [
        "add",
        "apply_patch",
        "calendar__list",
        "calendar__apply_patch",
        "local_shell",
    ]
    assert asked.notes.left_out == ("web_search",)
    assert asked.notes.ignored == {
        "parallel_tool_calls": False,
        "reasoning.effort": "high",
        "text.verbosity": "low",
        "prompt_cache_key": "0199",
    }


def test_tools_that_are_left_out_are_noted_as_far_as_they_are_few():
    """A record does not grow with what a client offers in vain."""
    asked = ask("hi", tools=[{"type": f"{i:03}" + "x" * 1_000} for i in range(1_000)])

    assert asked.notes.left_out == tuple(f"{i:03}" + "x" * 497 for i in range(16))


def test_a_function_is_what_it_is_in_chat_completions():
    """So that a conversation may change its dialect."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}

    asked = ask("hi", tools=[{"type": "function", "name": "add", "parameters": parameters, "strict": None}])

    assert asked.tools == (tool("add", properties={"a": {"type": "integer"}}),)


def test_a_custom_tool_is_a_function_with_one_text():
    """With its grammar in words."""
    function = ask("hi", tools=[PATCH]).tools[0]["function"]

    assert function["description"] == "Edits files."
    assert function["parameters"]["required"] == ["input"]
    assert "lark" in function["parameters"]["properties"]["input"]["description"]


@pytest.mark.parametrize(
    ("call", "item"),
    [
        (("add", '{"a": 1}'), {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "call_id": "call_0"}),
        (
            ("apply_patch", '{"input": "é\\n"}'),
            {"type": "custom_tool_call", "name": "apply_patch", "input": "é\n", "call_id": "call_0"},
        ),
        (
            ("apply_patch", '{"patch": "x"}'),
            {"type": "custom_tool_call", "name": "apply_patch", "input": '{"patch": "x"}', "call_id": "call_0_json"},
        ),
        (
            ("calendar__list", "{}"),
            {"type": "function_call", "name": "list", "namespace": "calendar", "arguments": "{}", "call_id": "call_0"},
        ),
        (
            ("local_shell", '{"command": ["ls"]}'),
            {"type": "local_shell_call", "call_id": "call_0", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        ),
    ],
)
def test_a_call_goes_back_as_the_kind_that_it_was(call, item):
    """Whatever the model made of it."""
    reply = {"role": "assistant", "content": None, "tool_calls": calls_of(call)}

    (output,) = OpenAIResponses().answer(answered(reply))["output"]

    assert output.items() >= {**item, "status": "completed"}.items()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
arguments = (
    st.dictionaries(st.text(max_size=5), json_values, max_size=3)
    | st.builds(lambda text: {"input": text}, st.text())
    | st.fixed_dictionaries(
        {"command": st.lists(st.text(max_size=5), max_size=3)}, optional={"env": json_values, "timeout_ms": json_values}
    )
)
calls = st.builds(
    tool_call,
    st.sampled_from(["add", "apply_patch", "calendar__list", "calendar__apply_patch", "local_shell", "x"]),
    arguments,
).filter(lambda call: call is not None)


@st.composite
def replies(draw: st.DrawFn) -> Json:
    """Assistant messages as a server records them."""
    tool_calls = [(call.name, call.arguments) for call in draw(st.lists(calls, max_size=3))]
    reply: Json = assistant(draw(st.text(max_size=300))) | {}
    if tool_calls:
        reply |= {"content": reply["content"] or None, "tool_calls": calls_of(*tool_calls)}
    if reasoning := draw(st.text(max_size=300)):
        reply["reasoning_content"] = reasoning
    return reply


@given(reply=replies(), cut=st.integers(0, 6))
def test_a_reply_that_a_client_refers_to_is_the_one_that_was_recorded(reply, cut):
    """Whichever of its items are there themselves."""
    recorded = answered(reply)
    items = OpenAIResponses().answer(recorded)["output"]
    referred = [{"type": "item_reference", "id": item["id"]} for item in items]

    for sent in ([*referred[:cut], *items[cut:]], [*items[:cut], *referred[cut:]]):
        asked = ask([user("hi"), *sent], recorded)

        assert list(asked.messages) == list(ask([user("hi"), *items], recorded).messages)


@given(reply=replies(), forgets=st.booleans())
def test_a_reply_that_a_client_sends_back_is_the_one_that_was_recorded(reply, forgets):
    """Also by a client that keeps neither ids nor the text of reasoning."""
    recorded = answered(reply)
    items = OpenAIResponses().answer(recorded)["output"]
    if forgets:
        items = [{name: value for name, value in item.items() if name not in ("id", "status")} for item in items]
        items = [item | ({"content": None} if item["type"] == "reasoning" else {}) for item in items]

    (_, sent) = ask([user("hi"), *items], recorded).messages

    assert EXACT(sent) == EXACT(reply)


def test_two_replies_in_a_row_stay_two():
    """Each has its reasoning first, and one text."""
    first, second = OpenAIResponses().answer(answered(assistant("a")))["output"] * 2

    assert list(ask([user("hi"), first, second]).messages) == [user("hi"), assistant("a"), assistant("a")]


def test_items_that_a_session_has_read_are_not_read_again():
    """Only new ones."""
    history = History()
    items = [user("hi"), {**assistant("a"), "type": "message"}]

    def read(items: list[Any]) -> ModelRequest:
        asked = parse_request(WireCall(json.dumps({"input": items}).encode()), DEFAULT_LIMITS, history)
        history.read(asked.messages, asked.tools, asked.recall)
        return asked

    read(items)
    again = read([*items, user("more")])

    assert again.recall.known == 2
    assert list(again.messages) == [user("hi"), assistant("a"), user("more")]


def turns_with(**notes: Any) -> list[Turn]:
    """The one turn of a session."""
    session = new_session()
    messages = [{"role": "system", "content": "old"}, user("hi")]
    return [structs.replace(take_turn(session, messages, "ho"), notes=TurnNotes(**notes))]


def test_a_previous_response_brings_its_conversation_and_not_its_instructions():
    """Those are said anew, or not at all."""
    body = {"input": "more", "instructions": "new", "previous_response_id": f"resp_{RESPONSE_ID}"}
    wire = WireCall(json.dumps(body).encode(), turns_until=lambda found: turns_with(instructions=found == RESPONSE_ID))

    assert list(parse_request(wire).messages) == [
        {"role": "system", "content": "new"},
        user("hi"),
        assistant("ho"),
        user("more"),
    ]


def test_a_system_message_of_the_input_is_part_of_the_conversation():
    """Unlike instructions."""
    body = {"input": "more", "previous_response_id": f"resp_{RESPONSE_ID}"}
    wire = WireCall(json.dumps(body).encode(), turns_until=lambda _: turns_with())

    assert parse_request(wire).messages[0] == {"role": "system", "content": "old"}


def test_an_unknown_previous_response_is_refused_by_its_name():
    """With the code by which clients send everything."""
    error = refusal("more", previous_response_id="resp_1")

    assert isinstance(error, PreviousResponseNotFound)
    assert (error.status, error.code, error.param) == (400, "previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        (None, ToolMode.AUTO, None),
        ("auto", ToolMode.AUTO, None),
        ("none", ToolMode.NONE, None),
        ("required", ToolMode.REQUIRED, None),
        ({"type": "function", "name": "add"}, ToolMode.REQUIRED, "add"),
        ({"type": "custom", "name": "apply_patch"}, ToolMode.REQUIRED, "apply_patch"),
        ({"type": "function", "name": "list", "namespace": "calendar"}, ToolMode.REQUIRED, "calendar__list"),
        ({"type": "local_shell"}, ToolMode.REQUIRED, "local_shell"),
    ],
)
def test_a_tool_choice_is_kept(choice, mode, name):
    """Of every kind that can be offered."""
    asked = ask("hi", tools=TOOLS, tool_choice=choice)

    assert (asked.tool_mode, asked.tool_name) == (mode, name)


def test_every_sampling_parameter_is_understood():
    """And a schema, in the way of all dialects."""
    asked = ask(
        "hi",
        temperature=0,
        top_p=0.5,
        max_output_tokens=7,
        top_logprobs=3,
        include=["message.output_text.logprobs"],
        text={"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "object"}}},
    )

    assert asked.sampling == SamplingWishes(7, 0, 0.5, top_logprobs=3, json_schema='{"type":"object"}')
    assert asked.wants_logprobs


DEEP: Any = 1
for _ in range(70):
    DEEP = {"a": DEEP}
CALL = {"type": "function_call", "name": "add", "call_id": "c", "arguments": "{}"}


@pytest.mark.parametrize(
    ("items", "fields", "param"),
    [
        ([], {}, "input"),
        (None, {}, "input"),
        (5, {}, "input"),
        (["x"], {}, "input[0]"),
        ([{"type": "web_search_call"}], {}, "input[0].type"),
        ([{"type": "item_reference", "id": "x"}], {}, "input[0].id"),
        ([{"type": "item_reference", "id": 5}], {}, "input[0].id"),
        ([{"type": "item_reference"}], {}, "input[0].id"),
        ([{"id": f"msg_{RESPONSE_ID}"}], {}, "input[0].id"),
        ([{}], {}, "input[0].type"),
        ([{"type": "message", "role": "tool", "content": ""}], {}, "input[0].role"),
        ([{"role": "user", "content": 5}], {}, "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], {}, "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], {}, "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], {}, "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], {}, "input[0].content[0].type"),
        ([CALL, CALL], {}, "input[1].call_id"),
        ([{"type": "function_call_output", "output": ""}], {}, "input[0].call_id"),
        ([CALL, {**CALL, "type": "function_call_output", "output": 5}], {}, "input[1].output"),
        ([{**CALL, "arguments": {}}], {}, "input[0].arguments"),
        ([{"type": "function_call", "call_id": "c"}], {}, "input[0]"),
        ([{"type": "local_shell_call", "call_id": "c", "action": DEEP}], {}, "input[0].action"),
        ([{"type": "reasoning", "content": [{"type": "blob"}]}], {}, "input[0].content[0].type"),
        ("hi", {"background": True}, "background"),
        ("hi", {"conversation": "conv_1"}, "conversation"),
        ("hi", {"prompt": {"id": "p"}}, "prompt"),
        ("hi", {"n": 2}, "n"),
        ("hi", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("hi", {"modalities": ["audio"]}, "modalities"),
        ("hi", {"temperature": -1}, "temperature"),
        ("hi", {"max_output_tokens": 0}, "max_output_tokens"),
        ("hi", {"stream": "yes"}, "stream"),
        ("hi", {"tools": [5]}, "tools[0]"),
        ("hi", {"tools": [{}]}, "tools[0]"),
        ("hi", {"tools": [{"type": "function"}]}, "tools[0].name"),
        ("hi", {"tools": [ADD, ADD]}, "tools[1].name"),
        ("hi", {"tools": [{"type": "x"}] * 1_025}, "tools"),
        ("hi", {"tools": [{**CALENDAR, "tools": [{"type": "x"}] * 1_025}]}, "tools[0].tools"),
        ("hi", {"tools": [{**CALENDAR, "tools": [{"type": "x"}] * 1_000}] * 2}, "tools[1].tools"),
        ("hi", {"tools": [{**CALENDAR, "name": "x" * 600_000}]}, "tools[0].tools"),
        ("hi", {"tools": [{**CALENDAR, "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name"),
        ("hi", {"tools": [{**ADD, "parameters": DEEP}]}, "tools"),
        ("hi", {"tool_choice": "required"}, "tool_choice"),
        ("hi", {"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ("hi", {"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]}, "tool_choice"),
        ("hi", {"tool_choice": {"type": "function", "name": "sub"}, "tools": [ADD]}, "tool_choice"),
        ("hi", {"tool_choice": {"type": "shell"}, "tools": [{**ADD, "name": "shell"}]}, "tool_choice"),
        ("hi", {"text": {"format": {"type": "json_object"}}, "tools": [ADD]}, "text.format"),
        ("hi", {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ("hi", {"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(items, fields, param):
    """Never ignored, and never a bug."""
    assert refusal(items, **fields).param == param


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        (TurnEnd.MODEL, "completed", None),
        (TurnEnd.TOOL_CALLS, "completed", None),
        (TurnEnd.LENGTH, "incomplete", "max_output_tokens"),
        (TurnEnd.REPEAT, "incomplete", "max_output_tokens"),
        (TurnEnd.DRAINED, "incomplete", "abort"),
    ],
)
def test_an_answer_says_how_it_ended(end, status, reason):
    """Never completed when somebody cut it short (I2)."""
    whole = OpenAIResponses().answer(answered(assistant("so"), end=end))

    assert (whole["status"], whole["output"][0]["status"]) == (status, status)
    assert whole["incomplete_details"] == (None if reason is None else {"reason": reason})
