"""The Messages dialect: blocks become the messages of the normal form, and what cannot be recorded is refused."""

from typing import Any

import msgspec
import pytest

from harness.dialects.anthropic_messages import AnthropicMessages
from harness.dialects.anthropic_messages_request import parse_request
from harness.dialects.model_request import ModelRequest, ToolMode, WireCall
from harness.dialects.openai_chat_request import parse_request as parse_chat
from harness.dialects.request_limits import DEFAULT_LIMITS
from harness.errors import (
    EngineUnavailable,
    GateClosed,
    HarnessError,
    LimitReached,
    MalformedRequest,
    RequestError,
    Unauthorized,
)
from harness.tokens.history import History
from harness.tokens.matching import chain_keys
from harness.types import Json
from tests.builders import body, tool, user

HI = [user("hi")]
TOOL: Json = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}


def use(call_id: str, **arguments: Any) -> Json:
    """A tool_use block."""
    return {"type": "tool_use", "id": call_id, "name": "add", "input": arguments}


def result(call_id: str, content: Any = "5", **fields: Any) -> Json:
    """A tool_result block."""
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def text(words: str, **fields: Any) -> Json:
    """A text block."""
    return {"type": "text", "text": words, **fields}


def says(*blocks: Json) -> Json:
    """A reply of blocks."""
    return {"role": "assistant", "content": list(blocks)}


def read(messages: Any, headers: dict[str, str] | None = None, **fields: Any) -> ModelRequest:
    """The request with those messages."""
    return parse_request(WireCall(body(messages, **{"max_tokens": 9, **fields}), headers or {}))


def refusal(messages: Any = HI, **fields: Any) -> RequestError:
    """The error for a request."""
    with pytest.raises(RequestError) as caught:
        read(messages, **fields)
    return caught.value


def test_a_conversation_is_that_of_chat_completions():
    """The same normal form from both dialects, tools included: the keys of a session do not tell them apart."""
    ours = read(
        [user("hi"), says(text("Sure."), use("c1", a=2)), {"role": "user", "content": [result("c1"), text("so?")]}],
        system="be kind",
        tools=[TOOL],
    )
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    asked = body(
        [
            {"role": "system", "content": "be kind"},
            user("hi"),
            {"role": "assistant", "content": "Sure.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
            user("so?"),
        ],
        tools=[tool(properties={}) | {"function": tool(properties={})["function"] | {"description": "Adds."}}],
    )
    theirs = parse_chat(WireCall(asked))

    assert chain_keys(ours.messages, ours.tools) == chain_keys(theirs.messages, theirs.tools)


def test_results_stand_where_they_are_said():
    """Several in one message, before, between and behind texts; their blocks are lines."""
    request = read(
        [
            user("hi"),
            says(use("c1"), use("c2")),
            {
                "role": "user",
                "content": [
                    text("one"),
                    text("two"),
                    result("c1", [text("a"), text("b")], is_error=True),
                    text("three"),
                    result("c2", None),
                ],
            },
        ]
    )

    assert [dict(message) for message in request.messages[2:]] == [
        user("one\ntwo"),
        {"role": "tool", "content": "a\nb", "tool_call_id": "c1", "is_error": True},
        user("three"),
        {"role": "tool", "content": "", "tool_call_id": "c2"},
    ]


def test_replies_in_a_row_are_one():
    """Clients send the blocks of a reply as messages of their own."""
    request = read([user("hi"), says(text("a")), {"role": "assistant", "content": "b"}, says(use("c1"))])

    [_, reply] = request.messages
    assert (reply["content"], [call["id"] for call in reply["tool_calls"]]) == ("ab", ["c1"])


def test_reasoning_is_read_and_what_was_redacted_is_kept_aside():
    """The model's own words are part of the reply; what nobody can read is no text of it."""
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    request = read([user("hi"), says(thinking, {"type": "redacted_thinking", "data": "zzz"}, text("a"))])

    assert request.messages[1] == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "hm",
        "redacted_thinking": ["zzz"],
    }


def test_a_system_prompt_may_stand_anywhere():
    """As text or blocks at the head, as messages later; one without text is none."""
    late = {"role": "system", "content": [text("be brief")]}
    request = read([user("hi"), late, {"role": "human", "content": "x"}], system=[text("a"), text("b")])

    assert [dict(message) for message in request.messages] == [
        {"role": "system", "content": "a\nb"},
        user("hi"),
        {"role": "system", "content": "be brief"},
        user("x"),
    ]
    assert request.notes.normalized == {"messages[2].role": "human"}
    assert read(HI, system=[]).messages == tuple(HI)


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        (None, ToolMode.AUTO, None),
        ({"type": "auto"}, ToolMode.AUTO, None),
        ({"type": "any"}, ToolMode.REQUIRED, None),
        ({"type": "tool", "name": "add"}, ToolMode.REQUIRED, "add"),
        ({"type": "none"}, ToolMode.NONE, None),
    ],
)
def test_tool_choice(choice, mode, name):
    """Every way to demand a call."""
    request = read(HI, tools=[TOOL], tool_choice=choice)

    assert (request.tool_mode, request.tool_name) == (mode, name)


def test_deferred_tools_are_offered_once_they_are_referenced():
    """Others are not there for the model until then."""
    deferred = TOOL | {"name": "late", "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "late"}
    history = [user("hi"), says(use("c1")), {"role": "user", "content": [result("c1", [reference])]}]

    before = read(HI, tools=[TOOL, deferred])
    after = read(history, tools=[TOOL, deferred])

    assert [each["function"]["name"] for each in before.tools] == ["add"]
    assert [each["function"]["name"] for each in after.tools] == ["add", "late"]
    assert after.messages[-1]["content"] == "Tool available: late"


def test_sampling_parameters():
    """Those of the dialect; a schema is followed."""
    request = read(
        HI,
        temperature=0,
        top_p=0.5,
        top_k=3,
        stop_sequences=["x", ""],
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"},
    )

    assert request.sampling.to_dict() == {
        "max_new_tokens": 9,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "stop": ("x",),
        "json_schema": '{"type":"object"}',
    }
    assert request.notes.ignored == {"output_config.effort": "low"}


def test_what_means_something_to_the_vendor_only_is_ignored_and_noted():
    """Settings of the vendor's with their values, as far as they are short; other fields by their names alone."""
    request = read(
        HI,
        {"anthropic-beta": "a,b", "anthropic-version": "2023-06-01"},
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "secret"},
        context_management={"edits": ["e" * 1_000]},
        service_tier=10**40,
        strange="secret",
    )

    ignored = request.notes.ignored
    assert ignored["thinking"] == {"type": "enabled", "budget_tokens": 1024}
    assert ignored["context_management"].startswith('{"edits": ["eee')
    assert len(ignored["context_management"]) == 500
    assert (ignored["anthropic-beta"], ignored["service_tier"]) == ("a,b", str(10**40))
    assert (ignored["metadata"], ignored["strange"]) == (None, None)
    assert request.notes.left_out == ("web_search",)
    assert [each["function"]["name"] for each in request.tools] == ["add"]
    assert b"secret" not in msgspec.json.encode(request.notes)


def test_what_the_vendor_would_run_is_refused_unless_there_is_none():
    """Clients state what they do not use."""
    asked = read(HI, mcp_servers=[], container=None)

    assert not asked.notes.ignored


def test_examples_of_a_tool_are_in_its_schema():
    """Where a template shows them."""
    asked = read(HI, tools=[TOOL | {"input_examples": [{"a": 1}]}])

    assert asked.tools[0]["function"]["parameters"]["examples"] == [{"a": 1}]


HOLDS_A_DOCUMENT = {"role": "user", "content": [result("c", [{"type": "document"}])]}
DEMANDS = {"type": "tool", "name": "s"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [use("c1")]}]}, "messages[0].content"),
        ({"messages": [says(result("c1"))]}, "messages[0].content"),
        ({"messages": [*HI, says(use("c1"), use("c1"))]}, "messages[1].content"),
        ({"messages": [says(use("c1") | {"input": "no"})]}, "messages[0].content.input"),
        ({"messages": [HOLDS_A_DOCUMENT]}, "messages[0].content[0].content[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
        ({"tools": [{"type": "web_search_1", "name": "s"}], "tool_choice": DEMANDS}, "tool_choice"),
        ({"tools": [{"description": "x"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL | {"defer_loading": True}, TOOL]}, "tools[1].name"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "authorization_token": "secret"}]}, "mcp_servers"),
        ({"container": "c_1"}, "container"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(fields, param):
    """The field, in the words of the dialect."""
    error = refusal(**({"messages": HI} | fields))

    assert error.param == param


def test_arguments_as_deep_as_a_tower_are_refused():
    """Encoders that recurse never see them."""
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}

    assert refusal([*HI, says(use("c1", x=deep))]).code == "over_limit"


def test_a_history_that_is_known_by_its_bytes_is_not_read_again():
    """Messages that come to several count as many; the reading is the same as without the history."""
    history = History()
    messages: list[Any] = [
        user("hi"),
        says(text("a"), use("c1")),
        {"role": "user", "content": [result("c1"), text("so?")]},
    ]
    calls = [body(messages[: 1 + 2 * i], system="s", tools=[TOOL]) for i in range(2)]
    calls.append(body([*messages, says(text("b")), user("more")], system="s", tools=[TOOL]))

    known = []
    for each in calls:
        request = parse_request(WireCall(each), DEFAULT_LIMITS, history)
        alone = parse_request(WireCall(each))
        prefixes = history.read(request.messages, request.tools, request.recall)
        known.append(request.recall.known)
        assert list(request.messages) == list(alone.messages)
        assert [prefix.key for prefix in prefixes] == chain_keys(alone.messages, alone.tools)

    assert known == [0, 2, 5]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MalformedRequest("no"), "invalid_request_error"),
        (Unauthorized("no"), "authentication_error"),
        (LimitReached("no"), "not_found_error"),
        (GateClosed("no"), "overloaded_error"),
        (EngineUnavailable("no"), "api_error"),
    ],
)
def test_errors_have_the_envelope_that_clients_parse(error: HarnessError, kind: str):
    """With the type of the dialect, our code, and the id under which the log has it."""
    told = AnthropicMessages().error_body(error, "no more", "7")

    assert told == {
        "type": "error",
        "error": {"type": kind, "message": "no more", "code": error.code},
        "request_id": "req_7",
    }


FIELDS = ["system", "tools", "tool_choice", "stream", "stop_sequences", "temperature", "top_k", "max_tokens"]
FIELDS += ["output_config", "metadata", "unknown", "\ud800"]
