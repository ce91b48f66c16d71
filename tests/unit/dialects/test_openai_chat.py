"""The OpenAI dialect: what clients really send is understood, everything else is refused by name."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.dialects.model_request import ModelAnswer, ToolMode, WireCall, reply_message
from harness.dialects.openai_chat import OpenAIChat
from harness.dialects.openai_chat_request import parse_request
from harness.errors import EngineUnavailable, LimitReached, MalformedRequest, RequestError
from harness.server.http.wire import parse_session_config
from harness.sessions.turn_outcome import Reply, end_turn
from harness.tokens.matching import chain_keys, next_key
from harness.tokens.parsing import ParsedOutput, ToolCall
from harness.turn_ends import TurnEnd
from harness.types import SamplingWishes
from tests.builders import (
    EOS,
    admit,
    assistant,
    body,
    new_session,
    output_of,
    sampled,
    toy_template,
    toy_tokenizer,
    user,
)

HI = [user("hi")]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def refusal(raw: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_request(WireCall(raw))
    return caught.value


def test_a_minimal_request_asks_for_nothing():
    """Only what a client states becomes a wish."""
    chat = parse_request(WireCall(body(HI)))

    assert (chat.messages, chat.tools, chat.tool_mode) == ((user("hi"),), (), ToolMode.AUTO)
    assert (chat.sampling, chat.wants_logprobs, chat.model) == (SamplingWishes(), False, "m")


def test_every_sampling_parameter_is_understood():
    """The names of OpenAI and the ones that open engines added."""
    raw = body(
        HI,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=-5,
        stop=["a", "", "b"],
        max_tokens=5,
        max_completion_tokens=7,
        logprobs=True,
        top_logprobs=3,
    )

    assert parse_request(WireCall(raw)).sampling == SamplingWishes(7, 0, 0.5, 0, 0.1, -5, ("a", "b"), 3)


def test_a_real_clients_request_is_understood():
    """An openai SDK in a tool loop: nulls, parts, unknown fields, its own answer as it was dumped."""
    raw = body(
        [
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "2+3?", "name": None},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}, "index": 0}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ],
        tools=[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": False}}],
        tool_choice="auto",
        parallel_tool_calls=True,
        stream=False,
        stream_options=None,
        n=None,
        user="me",
        store=False,
        response_format={"type": "text"},
        metadata={"a": "b"},
    )

    chat = parse_request(WireCall(raw))

    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}}
    assert chat.messages == (
        {"role": "developer", "content": "be brief"},
        user("2+3?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
    )
    assert chat.tools[0]["function"] == {"name": "add", "parameters": {"type": "object"}, "strict": False}


def test_tools_and_calls_keep_the_order_of_their_fields():
    """Templates write them as JSON, so another order is other tokens than the model was trained on."""
    offered = {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}

    chat = parse_request(WireCall(body([user("hi"), {"role": "assistant", "tool_calls": [called]}], tools=[offered])))

    assert json.dumps(chat.tools) == json.dumps([offered])
    assert json.dumps(chat.messages[1]["tool_calls"]) == json.dumps([called])


FORMATS: dict[str, tuple[dict | None, str | None]] = {
    "none": (None, None),
    "text": ({"type": "text"}, None),
    "any object": ({"type": "json_object"}, '{"type":"object"}'),
    "a schema of an object": ({"type": "json_object", "schema": {"required": ["a"]}}, '{"required":["a"]}'),
    "a schema": (
        {
            "type": "json_schema",
            "json_schema": {"name": "n", "strict": True, "schema": {"type": "array", "title": "ü"}},
        },
        '{"type":"array","title":"ü"}',
    ),
}


@pytest.mark.parametrize(("response_format", "schema"), FORMATS.values(), ids=FORMATS)
def test_a_response_format_is_a_schema(response_format, schema):
    """As JSON text, which is how engines take it."""
    assert parse_request(WireCall(body(HI, response_format=response_format))).sampling.json_schema == schema


REPLIES = [
    ParsedOutput("plain"),
    ParsedOutput(""),
    ParsedOutput("  spaces \n"),
    ParsedOutput("", (ToolCall("f", '{"a": 1}'),)),
    ParsedOutput("text", (ToolCall("f", "{}"), ToolCall("g", '{"b": "ü"}'))),
]
CLIENTS = {
    "as it came": lambda message: message,
    "nulls left out": lambda message: {name: value for name, value in message.items() if value is not None},
    "nulls written": lambda message: {"refusal": None, "audio": None, "annotations": [], "tool_calls": None} | message,
    "empty for null": lambda message: message | {"content": message["content"] or ""},
    "null for empty": lambda message: message | {"content": message["content"] or None},
    "parts": lambda message: message | {"content": [{"type": "text", "text": message["content"] or ""}]},
    "two parts": lambda message: (
        message | {"content": [{"type": "text", "text": part} for part in halves(message["content"] or "")]}
    ),
    "empty list of calls": lambda message: {"tool_calls": []} | message,
    "other order": lambda message: dict(reversed(message.items())),
    "indexed calls": lambda message: (
        message | {"tool_calls": [call | {"index": i} for i, call in enumerate(message.get("tool_calls", []))]}
    ),
}


def halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


@pytest.mark.parametrize("parsed", REPLIES, ids=range(len(REPLIES)))
@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_an_answer_that_a_client_sends_back_is_recognized(parsed, client):
    """Whatever a client library does to a message by itself, its key is that of the answer that was served."""
    reply = reply_message(parsed, "call_0_")
    served = json.loads(msgspec.json.encode(reply))

    chat = parse_request(WireCall(body([user("hi"), client(served), user("next")])))

    keys = chain_keys(chat.messages, chat.tools)
    assert keys[2] == next_key(keys[1], reply)


@pytest.mark.parametrize("other", [{"content": "plain!"}, {"content": None}, {"name": "x"}, {"reasoning_content": "r"}])
def test_an_answer_that_was_changed_is_not(other):
    """What a reader would call another message has another key."""
    reply = reply_message(ParsedOutput("plain"), "call_0_")

    chat = parse_request(WireCall(body([user("hi"), reply | other])))

    keys = chain_keys(chat.messages, ())
    assert keys[2] != next_key(keys[1], reply)


WRONG = {
    "messages missing": (b"{}", None),
    "messages null": (b'{"messages": null}', "messages"),
    "messages empty": (body([]), "messages"),
    "messages is text": (b'{"messages": "hi"}', "messages"),
    "message is text": (body(["hi"]), "messages[0]"),
    "message is null": (body([None]), "messages[0]"),
    "role missing": (body([{"content": "x"}]), "messages[0]"),
    "role unknown": (body([{"role": "robot", "content": "x"}]), "messages[0].role"),
    "role is a number": (body([{"role": 1, "content": "x"}]), "messages[0].role"),
    "content is a number": (body([{"role": "user", "content": 3}]), "messages[0].content"),
    "content is an object": (body([{"role": "user", "content": {}}]), "messages[0].content"),
    "image": (body([{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type"),
    "part without text": (body([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0]"),
    "two tools of one name": (body(HI, tools=[{"function": {"name": "f"}}] * 2), "tools[1].function.name"),
    "call without name": (
        body([{"role": "assistant", "tool_calls": [{"function": {}}]}]),
        "messages[0].tool_calls[0].function",
    ),
    "arguments is an object": (
        body([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]),
        "messages[0].tool_calls[0].function.arguments",
    ),
    "n": (body(HI, n=2), "n"),
    "n is true": (body(HI, n=True), "n"),
    "stream": (body(HI, stream="yes"), "stream"),
    "stream options without a stream": (body(HI, stream_options={"include_usage": True}), "stream_options"),
    "stream options": (body(HI, stream=True, stream_options=[]), "stream_options"),
    "temperature": (body(HI, temperature=-1), "temperature"),
    "temperature is text": (body(HI, temperature="hot"), "temperature"),
    "top_p": (body(HI, top_p=0), "top_p"),
    "top_p above": (body(HI, top_p=1.1), "top_p"),
    "top_k": (body(HI, top_k=-2), "top_k"),
    "top_k is a fraction": (body(HI, top_k=1.5), "top_k"),
    "min_p": (body(HI, min_p=2), "min_p"),
    "max_tokens": (body(HI, max_tokens=0), "max_tokens"),
    "max_tokens negative": (body(HI, max_completion_tokens=-1), "max_completion_tokens"),
    "seed": (body(HI, seed=2**63), "seed"),
    "seed is huge": (body(HI, seed=10**300), "seed"),
    "stop is a number": (body(HI, stop=3), "stop"),
    "stop holds a number": (body(HI, stop=["a", 3]), "stop[1]"),
    "tools is an object": (body(HI, tools={}), "tools"),
    "tool without function": (body(HI, tools=[{"type": "function"}]), "tools[0]"),
    "tool of another kind": (body(HI, tools=[{"type": "custom", "function": {"name": "f"}}]), "tools[0].type"),
    "tool_choice unknown": (body(HI, tool_choice="maybe"), "tool_choice"),
    "tool_choice required without tools": (body(HI, tool_choice="required"), "tool_choice"),
    "tool_choice names another": (
        body(HI, tools=[{"function": {"name": "f"}}], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice",
    ),
    "min_tokens": (body(HI, min_tokens=-1), "min_tokens"),
    "min_tokens above max_tokens": (body(HI, min_tokens=6, max_tokens=5), "min_tokens"),
    "response_format unknown": (body(HI, response_format={"type": "regex"}), "response_format.type"),
    "response_format without its schema": (body(HI, response_format={"type": "json_schema"}), "response_format"),
    "a schema that is none": (
        body(HI, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": []}}),
        "response_format.json_schema.schema",
    ),
    "a schema with a number that does not fit": (
        body(HI, response_format={"type": "json_schema", "json_schema": {"schema": {"maximum": 2**70}}}),
        "response_format",
    ),
    "response_format beside tools": (
        body(HI, tools=[{"function": {"name": "f"}}], response_format={"type": "json_object"}),
        "response_format",
    ),
    "top_logprobs": (body(HI, logprobs=True, top_logprobs=-1), "top_logprobs"),
    "logit_bias": (body(HI, logit_bias={"7": -100}), "logit_bias"),
    "two calls of one id": (body([{"role": "assistant", "tool_calls": [CALL, CALL]}]), "messages[0]"),
}


@pytest.mark.parametrize(("raw", "param"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(raw, param):
    """The answer points at the field, in `param` and in the text."""
    error = refusal(raw)

    assert (error.status, error.param) == (400, param)
    assert (param or "messages") in error.message


@pytest.mark.parametrize("reasoning", ["5", "{}", "[null]", "1e999", "1" * 400, "[" * 900 + "]" * 900])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_details"])
def test_reasoning_under_another_name_that_is_no_text_says_nothing(name, reasoning):
    """Whatever a vendor keeps there: no such field was an error before it had a meaning."""
    raw = b'{"messages":[{"role":"assistant","content":"yes","%s":%s}]}' % (name.encode(), reasoning.encode())

    assert parse_request(WireCall(raw)).messages == (assistant("yes"),)


NOT_JSON = {
    "empty": b"",
    "cut off": b'{"messages": [',
    "text": b"hello",
    "NUL": b'{"messages": [\x00]}',
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "half a surrogate pair": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "NaN": b'{"messages": [], "temperature": NaN}',
    "a number beyond float": b'{"messages": [], "temperature": 1e999}',
    "trailing text": body(HI) + b"x",
    "deep list": b"[" * 100_000,
    "deep schema": b'{"messages":[{"role":"user"}],"tools":[{"function":{"name":"f","parameters":' + b'{"a":' * 100_000,
    "list": b"[]",
    "null": b"null",
    "byte order mark": b"\xef\xbb\xbf" + body(HI),
}


@pytest.mark.parametrize("raw", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_no_request_is_refused(raw):
    """Any bytes are answered with a sentence."""
    assert refusal(raw).status == 400


def outcome_of(serve_body, raw: bytes) -> RequestError | None:
    """The refusal of a body, None when it was served; any other exception fails the test."""
    try:
        serve_body(raw)
    except RequestError as error:
        return error
    return None


def nested(depth: int) -> bytes:
    inner = b'{"a":' * depth + b"1" + b"}" * depth
    return b'{"messages":[{"role":"user","content":"x"}],"tools":[{"function":{"name":"f","parameters":%s}}]}' % inner


def serve(raw: bytes) -> None:
    """Everything the server does with a body before the engine."""
    chat = parse_request(WireCall(raw))
    chain_keys(chat.messages, chat.tools)
    toy_template().render_ids(chat.messages, chat.tools)


@pytest.mark.parametrize("depth", [50, 100, 240, 330, 500, 950, 5_000])
def test_a_schema_of_any_depth_is_served_or_refused(depth):
    """Templates and encoders recurse: a schema too deep for any of them is refused before they see it."""
    error = outcome_of(serve, nested(depth))

    assert error is None if depth < 60 else error.param in ("tools", None)


@pytest.mark.parametrize("number", ["18446744073709551616", "-9223372036854775809", "1" + "0" * 300])
def test_a_schema_with_a_huge_number_is_served_or_refused(number):
    """A bound beyond 64 bits has no place in a digest; it is refused by name, never an internal error."""
    raw = nested(1).replace(b"1}", number.encode() + b"}")

    error = refusal(raw)

    assert (error.status, error.param) == (400, "tools")


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.sampled_from(["\ud800", "\x00", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["metadata", "limits", "sampling", "after_incomplete", "selection"]), ANY))
def test_any_session_config_is_one_or_a_request_error(fields):
    """The same holds for what an owner sends; and what is accepted can be stored."""
    error = outcome_of(lambda raw: msgspec.json.encode(parse_session_config(raw)), json.dumps(fields).encode())

    assert error is None or error.status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"limits": {"turns": 0}}, "limits.turns"),
        ({"limits": {"turns": 10**30}}, "limits.turns"),
        ({"limits": {"tokens": 5}}, "limits"),
        ({"sampling": {"temperature": -0.1}}, "sampling.temperature"),
        ({"sampling": {"seed": -1}}, "sampling.seed"),
        ({"sampling": {"stop": [""]}}, "sampling.stop[0]"),
        ({"after_incomplete": "maybe"}, "after_incomplete"),
        ({"selection": "best"}, "selection"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"a": 10**30}}, "metadata"),
        ({"metadata": {"a": json.loads("[" * 200 + "]" * 200)}}, "metadata"),
        ({"unknown": 1}, None),
    ],
)
def test_a_wrong_session_config_is_named(fields, param):
    """An owner's typo is not ignored."""
    with pytest.raises(RequestError) as caught:
        parse_session_config(json.dumps(fields).encode())

    assert caught.value.param == param


def test_a_reply_with_calls_has_ids_of_its_own():
    """Content is None beside calls, an empty text without them."""
    message = reply_message(ParsedOutput("", (ToolCall("f", "{}"), ToolCall("g", '{"a": 1}'))), "call_7_")

    assert message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_7_0", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "call_7_1", "type": "function", "function": {"name": "g", "arguments": '{"a": 1}'}},
        ],
    }
    assert reply_message(ParsedOutput(""), "call_7_") == assistant("")


def test_a_completion_says_what_the_turn_is():
    """Usage counts tokens as they were, logprobs name every sampled id, the stop id included."""
    session = new_session()
    admission = admit(session, HI)
    result = sampled(admission, "yo")
    turn = end_turn(admission, output_of(result), Reply(assistant("yo"), TurnEnd.MODEL), 1_003.0)

    request = parse_request(WireCall(body(HI, logprobs=True)))
    answer = OpenAIChat().answer(ModelAnswer(request, turn, "m", toy_tokenizer().token_text))

    assert answer["usage"]["prompt_tokens"] == admission.prompt_ids.size
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["message"] == assistant("yo")
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["y", "o", toy_tokenizer().token_text(EOS)]
    assert [entry["logprob"] for entry in entries] == result.logprobs.tolist()


@pytest.mark.parametrize(
    ("error", "kind", "param"),
    [
        (MalformedRequest("no", param="n"), "invalid_request_error", "n"),
        (MalformedRequest("no", param="messages"), "invalid_request_error", "messages"),
        (LimitReached("no"), "limit_error", None),
        (EngineUnavailable("no"), "engine_error", None),
    ],
)
def test_errors_have_the_form_that_clients_parse(error, kind, param):
    """Message, type, param and code, as OpenAI's own API."""
    told = {"message": "no more", "type": kind, "param": param, "code": error.code}
    assert OpenAIChat().error_body(error, "no more", "req") == {"error": told}


def test_an_empty_logit_bias_is_none():
    """Some clients always send it."""
    assert parse_request(WireCall(body(HI, logit_bias={}))).messages == (user("hi"),)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("structured_outputs", {"json": {}}),
        ("repetition_penalty", 1.2),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("bad_words", ["no"]),
        ("stop_token_ids", [7]),
        ("documents", [{"text": "a"}]),
        ("chat_template", "{{ messages }}"),
        ("ignore_eos", True),
        ("min_new_tokens", 8),
        ("use_beam_search", True),
        ("best_of", 4),
        ("allowed_token_ids", [1]),
        ("truncate_prompt_tokens", 100),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
        ("enable_thinking", False),
        ("think", False),
        ("thinking_budget", 0),
        ("repeat_penalty", 1.1),
        ("mirostat", 2),
        ("tfs_z", 0.9),
        ("dry_multiplier", 0.8),
        ("xtc_probability", 0.5),
        ("dynatemp_range", 0.5),
        ("top_n_sigma", 1.5),
        ("bad_words_ids", [[7]]),
        ("samplers", ["top_k"]),
        ("grammar", "root ::= [a-z]+"),
        ("format", "json"),
        ("num_predict", 8),
        ("random_seed", 3),
        ("safe_prompt", True),
        ("prompt_mode", "reasoning"),
        ("prompt_truncate_len", 100),
        ("response_prefix", "Once"),
        ("adapter_id", "a/b"),
    ],
)
def test_a_wish_that_changes_prompt_or_sampling_is_refused_by_name(name, value):
    """Never ignored; the message says what to ask for instead."""
    with pytest.raises(MalformedRequest, match=f"^{name}: ") as caught:
        parse_request(WireCall(body([user("hi")], **{name: value})))

    assert caught.value.param == name


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, "function_call"),
        ({"role": "assistant", "content": "Once", "prefix": True}, "prefix"),
        ({"role": "assistant", "content": "Once", "partial": True}, "partial"),
        ({"role": "assistant", "content": None, "audio": {"id": "a"}}, "audio"),
    ],
)
def test_a_field_of_a_message_that_says_more_is_refused_by_name(message, field):
    """A legacy call would be gone, a prefix would be an answer of its own; without a value they say nothing."""
    with pytest.raises(MalformedRequest, match=rf"^messages\[1\]\.{field}: ") as caught:
        parse_request(WireCall(body([user("hi"), message])))
    unsaid = parse_request(WireCall(body([user("hi"), message | {field: None}]))).messages[1]

    assert caught.value.param == f"messages[1].{field}"
    assert unsaid == {"role": "assistant", "content": message["content"] or ""}


def test_a_refusal_is_what_was_said():
    """OpenAI's models answer with it instead of a content."""
    said = {"role": "assistant", "content": None, "refusal": "No."}

    assert parse_request(WireCall(body([user("hi"), said]))).messages[1] == {"role": "assistant", "content": "No."}


def test_a_function_keeps_what_it_says_of_its_result():
    """Templates show `return`, as transformers gives it to them; fields of the vendor beside the function are gone."""
    returns = {"type": "integer", "description": "The sum."}
    more = dict.fromkeys("zyxwvutsrq", 1)
    function = {"return": returns, "name": "add", **more}
    offered = {"type": "function", "function": function, "cache_control": {"type": "x"}}

    asked = parse_request(WireCall(body([user("hi")], tools=[offered])))

    assert asked.tools == ({"type": "function", "function": function},)
    assert list(asked.tools[0]["function"]) == ["name", "return", *more]


def test_variables_of_the_template_are_read():
    """The effort is one of them; a penalty that changes nothing is none."""
    wishes = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "repetition_penalty": 1.0}
    wishes |= {"ignore_eos": False, "best_of": 1, "continue_final_message": False, "add_generation_prompt": True}
    wishes |= {"repeat_penalty": 1.0, "mirostat": 0, "dry_multiplier": 0.0, "top_n_sigma": -1, "safe_prompt": False}

    asked = parse_request(WireCall(body([user("hi")], **wishes)))

    assert asked.template_variables == {"enable_thinking": False, "reasoning_effort": "low"}
    assert asked.ignored == ()
