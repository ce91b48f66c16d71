"""The Gemini dialect: parts become the messages of the normal form, and what cannot be recorded is refused."""

import json
import sys
from types import FrameType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.dialects.dialect import is_call, name_dialect
from harness.dialects.gemini import Gemini
from harness.dialects.gemini_contents import sign
from harness.dialects.gemini_request import ARRAY, parse_request
from harness.dialects.gemini_spelling import json_schema, respell
from harness.dialects.model_request import AnswerHead, ModelAnswer, ModelRequest, ToolMode, WireCall
from harness.dialects.openai_chat_request import parse_request as parse_chat
from harness.dialects.request_limits import DEFAULT_LIMITS, RequestLimits
from harness.dialects.sse import MEDIA_TYPE
from harness.errors import (
    EngineReplyInvalid,
    EngineUnavailable,
    GateClosed,
    HarnessError,
    MalformedRequest,
    OverLimit,
    PromptTooLong,
    RequestError,
    Unauthorized,
)
from harness.tokens.history import History
from harness.tokens.matching import chain_keys
from harness.types import Json
from tests.builders import body, toy_tokenizer, user
from tests.dialects.speakers import gather_parts
from tests.unit.dialects.said import said_of
from tests.unit.dialects.test_openai_responses import RESPONSE_ID, replies
from tests.unit.dialects.test_said_streams import answered

GEMINI = Gemini()
HI: list[Json] = [{"role": "user", "parts": [{"text": "hi"}]}]
ADD: Json = {"name": "add", "description": "Adds.", "parametersJsonSchema": {"type": "object", "properties": {}}}
"""A function, as clients of JSON Schema declare it."""
PATH = "/sessions/1/v1beta/models/org/model:generateContent"
RENAMED = "systemInstruction functionDeclarations parametersJsonSchema toolConfig functionCallingConfig functionCall"
RENAMED += " functionResponse thinkingConfig allowedFunctionNames generationConfig maxOutputTokens includeThoughts"
STREAM = PATH.replace("generate", "streamGenerate")


def read(contents: Any = HI, path: str = PATH, query: dict[str, str] | None = None, **fields: Any) -> ModelRequest:
    """The request with those contents."""
    return parse_request(WireCall(json.dumps({"contents": contents, **fields}).encode(), query=query or {}, path=path))


def refusal(contents: Any = HI, **fields: Any) -> RequestError:
    """The error for a request."""
    with pytest.raises(RequestError) as caught:
        read(contents, **fields)
    return caught.value


def called(name: str = "add", call_id: str | None = "c1", **args: Any) -> Json:
    """A part that calls."""
    return {"functionCall": {"name": name, "args": args, **({"id": call_id} if call_id else {})}}


def response(text: Any = "5", name: str = "add", call_id: str | None = "c1") -> Json:
    """A part that answers a call."""
    said = {"name": name, "response": {"output": text}, **({"id": call_id} if call_id else {})}
    return {"functionResponse": said}


def conversation(*replied: Json, answered: list[Json]) -> list[Json]:
    """A question, a reply of parts, and the answers to its calls."""
    return [*HI, {"role": "model", "parts": list(replied)}, {"role": "user", "parts": answered}]


def test_a_conversation_is_that_of_chat_completions():
    """The same normal form from both dialects, functions included: the keys of a session do not tell them apart."""
    ours = read(
        conversation({"text": "Sure."}, called(a=2), answered=[response(), {"text": "so?"}]),
        systemInstruction={"parts": [{"text": "be "}, {"text": "kind"}]},
        tools=[{"functionDeclarations": [ADD]}],
    )
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    asked = [
        {"role": "system", "content": "be kind"},
        user("hi"),
        {"role": "assistant", "content": "Sure.", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        user("so?"),
    ]
    declared = {"name": "add", "description": "Adds.", "parameters": ADD["parametersJsonSchema"]}
    theirs = parse_chat(WireCall(body(asked, tools=[{"type": "function", "function": declared}])))

    assert list(ours.messages) == list(theirs.messages)
    assert chain_keys(ours.messages, ours.tools) == chain_keys(theirs.messages, theirs.tools)


def test_settings_are_sampling_wishes():
    """The SDK sends `topK` as a fraction of nothing."""
    settings = {
        "temperature": 0.5,
        "topP": 0.9,
        "topK": 40.0,
        "maxOutputTokens": 7,
        "stopSequences": ["a", ""],
        "seed": 3,
    }
    asked = read(generationConfig={**settings, "responseLogprobs": True, "logprobs": 2, "candidateCount": 1})
    wishes = asked.sampling

    assert (wishes.temperature, wishes.top_p, wishes.top_k, wishes.max_new_tokens) == (0.5, 0.9, 40, 7)
    assert (wishes.stop, wishes.seed, wishes.top_logprobs, asked.wants_logprobs) == (("a",), 3, 2, True)
    assert (asked.model, asked.streaming, asked.ignored) == ("org/model", None, ())


@pytest.mark.parametrize(("query", "form"), [({"alt": "sse"}, MEDIA_TYPE), ({}, ARRAY), ({"alt": "json"}, ARRAY)])
def test_the_path_asks_for_a_stream_and_the_query_for_its_form(query: dict[str, str], form: str):
    """An array of JSON without `alt=sse`."""
    streaming = read(path=STREAM, query=query).streaming

    assert streaming is not None
    assert (streaming.media_type, streaming.wants_usage) == (form, True)


def test_names_in_snake_case_are_the_same_request():
    """The real API reads both. Names that a client made up stay as they are."""
    camel = {
        "contents": conversation(called(a_b={"c_d": 1}), answered=[response()]),
        "systemInstruction": {"parts": [{"text": "be"}]},
        "tools": [
            {"functionDeclarations": [{**ADD, "name": "add"}, {"name": "my_tool", "parameters": {"type": "OBJECT"}}]}
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["my_tool"]}},
        "generationConfig": {"maxOutputTokens": 5, "thinkingConfig": {"includeThoughts": True}},
    }
    renamed = {
        name: "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
        for name in RENAMED.split()
    }
    snake = json.dumps(camel)
    for name, other in renamed.items():
        snake = snake.replace(f'"{name}"', f'"{other}"')
    ours, theirs = (parse_request(WireCall(each.encode(), path=PATH)) for each in (json.dumps(camel), snake))

    assert snake != json.dumps(camel)
    assert msgspec.structs.replace(theirs, recall=ours.recall) == ours
    assert theirs.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"a_b": {"c_d": 1}}'
    assert (theirs.tool_name, theirs.wants_reasoning, theirs.ignored) == ("my_tool", True, ())


VALUES = st.recursive(
    st.none() | st.integers(0, 9) | st.text(max_size=3),
    lambda each: st.lists(each) | st.dictionaries(st.text("abC", max_size=4), each),
)


@given(value=VALUES)
def test_respelling_keeps_everything_else(value: Any):
    """Values, and names without an underscore; what a client made up keeps even these."""
    said = {"a_b": value, "args": {"a_b": value}}

    assert json.loads(bytes(respell(json.dumps(said).encode()))) == {"aB": value, "args": {"a_b": value}}


def test_a_schema_of_the_api_is_a_json_schema():
    """Types in lower case, null as a type, counts as numbers, properties in their order."""
    schema = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "nullable": True, "enum": ["a"]},
            "rows": {"type": "ARRAY", "min_items": "1", "items": {"any_of": [{"type": "INTEGER"}, {"type": "NUMBER"}]}},
        },
        "required": ["rows"],
        "propertyOrdering": ["rows", "type"],
    }
    formed = json_schema(schema)

    assert formed == {
        "type": "object",
        "properties": {
            "rows": {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "integer"}, {"type": "number"}]}},
            "type": {"type": ["string", "null"], "enum": ["a", None]},
        },
        "required": ["rows"],
    }
    assert list(formed["properties"]) == ["rows", "type"]


@pytest.mark.parametrize(
    ("schema", "formed"),
    [
        ({"anyOf": [{"type": "INTEGER"}]}, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        ({"anyOf": [{"type": "NULL"}]}, {"anyOf": [{"type": "null"}]}),
        ({"$ref": "#/$defs/a"}, {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}),
        ({"enum": ["a"]}, {"enum": ["a", None]}),
        ({"type": "OBJECT", "anyOf": [{}]}, {"type": ["object", "null"], "anyOf": [{}, {"type": "null"}]}),
        ({}, {}),
    ],
)
def test_null_is_allowed_wherever_a_schema_is_nullable(schema: Json, formed: Json):
    """Not only beside a type."""
    assert json_schema({**schema, "nullable": True}) == formed
    assert json_schema({**schema, "nullable": False}) == json_schema(schema)


def test_a_schema_for_the_answer_is_served_in_either_form():
    """The subset of OpenAPI, JSON Schema, and none."""
    ways = ({"responseSchema": {"type": "STRING"}}, {"responseJsonSchema": {"type": "string"}}, {})
    asked = [read(generationConfig={"responseMimeType": "application/json", **way}) for way in ways]

    assert [each.sampling.json_schema for each in asked] == ['{"type":"string"}'] * 2 + ['{"type":"object"}']


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        ({}, ToolMode.AUTO, None),
        ({"mode": "VALIDATED"}, ToolMode.AUTO, None),
        ({"mode": "NONE"}, ToolMode.NONE, None),
        ({"mode": "ANY"}, ToolMode.REQUIRED, None),
        ({"mode": "ANY", "allowedFunctionNames": ["add"]}, ToolMode.REQUIRED, "add"),
        ({"mode": "ANY", "allowedFunctionNames": ["add", "sub"]}, ToolMode.REQUIRED, None),
    ],
)
def test_the_freedom_to_call(choice: Json, mode: ToolMode, name: str | None):
    """All functions or one."""
    functions = [{"functionDeclarations": [ADD]}, {"functionDeclarations": [{"name": "sub"}]}]
    asked = read(tools=functions, toolConfig={"functionCallingConfig": choice})

    assert (asked.tool_mode, asked.tool_name) == (mode, name)


def test_tools_of_the_vendor_are_left_out_and_settings_ignored_by_name():
    """Both are noted."""
    asked = read(
        tools=[{"googleSearch": {}, "functionDeclarations": [ADD]}],
        safetySettings=[{"category": "X"}],
        labels={"a": "b"},
        generationConfig={"thinkingConfig": {"thinkingBudget": -1, "thinkingLevel": "HIGH"}, "mediaResolution": "LOW"},
    )

    assert asked.notes.left_out == ("googleSearch",)
    assert [each["function"]["name"] for each in asked.tools] == ["add"]
    assert asked.notes.ignored == {
        "safetySettings": [{"category": "X"}],
        "labels": None,
        "generationConfig.thinkingConfig.thinkingBudget": -1,
        "generationConfig.thinkingConfig.thinkingLevel": "HIGH",
        "generationConfig.mediaResolution": None,
    }


def test_settings_below_a_name_of_either_spelling_are_read_in_either():
    """Names in snake_case within those in camelCase."""
    asked = read(generationConfig={"thinkingConfig": {"include_thoughts": True}})
    called = read(
        tools=[{"functionDeclarations": [ADD]}], toolConfig={"functionCallingConfig": {"mode": "ANY", "x": 1}}
    )
    other = read(toolConfig={"functionCalling": {"mode": "ANY"}})

    assert asked.wants_reasoning
    assert (called.tool_mode, called.ignored) == (ToolMode.REQUIRED, ("toolConfig.functionCallingConfig.x",))
    assert other.ignored == ("toolConfig.functionCalling",)


def test_a_value_that_asks_for_nothing_is_not_noted():
    """In either spelling."""
    settings = {"bestOf": 1, "min_new_tokens": 0, "frequency_penalty": 0, "presencePenalty": 0}
    assert read(generationConfig=settings, ignoreEos=False).ignored == ()


@pytest.mark.parametrize("parts", [[{"text": "a"}, {"inlineData": {}}], {"text": "a"}])
def test_a_part_that_cannot_be_read_is_named(parts: Any):
    """Its message lists the parts that can."""
    assert "contents[0].parts" in refusal([{"parts": parts}]).message


@pytest.mark.parametrize("place", ["contents", "systemInstruction"])
def test_parts_are_counted_before_they_are_read(place: str):
    """The fourth of three cannot be read, and is not."""
    content = {"parts": [{"text": "a"}, {"text": "b"}, {"text": "c"}, {"inlineData": {}}]}
    fields = {"contents": HI, place: [content] if place == "contents" else content}
    with pytest.raises(OverLimit) as caught:
        parse_request(WireCall(json.dumps(fields).encode(), path=PATH), RequestLimits(messages=3))

    assert (caught.value.limit, caught.value.param) == ("messages", "contents")


def steps(**fields: Any) -> int:
    """Count the lines of the dialects that run to read a request: other code may be a finalizer's."""
    before, count = sys.gettrace(), 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if not frame.f_globals.get("__name__", "").startswith("harness.dialects"):
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        read(**fields)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("names", ["ab", "aa"])
@pytest.mark.parametrize("has_ids", [False, True])
def test_twice_the_calls_and_responses_are_twice_the_work(names: str, has_ids: bool):
    """Also for responses that answer no call, or the last call first."""

    def work(calls: int) -> int:
        ids = [f"c{number}" if has_ids else None for number in range(calls)]
        made = [called(names[0], each) for each in ids]
        return steps(contents=conversation(*made, answered=[response("", names[1], each) for each in ids[::-1]]))

    assert work(200) < 2.2 * work(100)


def test_a_function_that_is_allowed_many_times_is_looked_up_once():
    """Each look-up walks the functions."""

    def work(times: int) -> int:
        choice = {"mode": "ANY", "allowedFunctionNames": ["add"] * times}
        return steps(tools=[{"functionDeclarations": [ADD]}], toolConfig={"functionCallingConfig": choice})

    work(1)  # the first call reads what later ones find
    assert work(200) == work(100)


REFUSED: dict[str, tuple[Json, str]] = {
    "no contents": ({"contents": []}, "contents"),
    "a role of others": ({"contents": [{"role": "assistant", "parts": [{"text": "a"}]}]}, "contents[0].role"),
    "an image": (
        {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": ""}}]}]},
        "contents[0].parts[0]",
    ),
    "a file in snake case": ({"contents": [{"parts": [{"file_data": {"file_uri": "x"}}]}]}, "contents[0].parts[0]"),
    "text and a call": ({"contents": [{"role": "model", "parts": [called() | {"text": "a"}]}]}, "contents[0].parts[0]"),
    "a call of the user": ({"contents": [{"parts": [called()]}]}, "contents[0].parts[0].functionCall"),
    "a response of the model": (
        {"contents": [{"role": "model", "parts": [response()]}]},
        "contents[0].parts[0].functionResponse",
    ),
    "an id twice": ({"contents": [{"role": "model", "parts": [called(), called()]}]}, "contents[0].parts"),
    "arguments that are no object": (
        {"contents": [{"role": "model", "parts": [{"functionCall": {"name": "a", "args": [1]}}]}]},
        "contents[0].parts[0].functionCall.args",
    ),
    "a function twice": ({"tools": [{"functionDeclarations": [ADD, ADD]}]}, "tools.functionDeclarations[1].name"),
    "a function without a name": ({"tools": [{"functionDeclarations": [{}]}]}, "tools.functionDeclarations[0].name"),
    "a call of none": (
        {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
        "toolConfig.functionCallingConfig.mode",
    ),
    "a mode of no kind": (
        {"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}},
        "toolConfig.functionCallingConfig.mode",
    ),
    "an unknown function": (
        {
            "tools": [{"functionDeclarations": [ADD]}],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["sub"]}},
        },
        "toolConfig.functionCallingConfig.allowedFunctionNames",
    ),
    "a part of the functions": (
        {
            "tools": [{"functionDeclarations": [ADD, {"name": "sub"}]}],
            "toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["add"]}},
        },
        "toolConfig.functionCallingConfig.allowedFunctionNames",
    ),
    "two candidates": ({"generationConfig": {"candidateCount": 2}}, "candidateCount"),
    "a penalty": ({"generationConfig": {"presencePenalty": 0.5}}, "presencePenalty"),
    "another penalty": ({"generation_config": {"frequency_penalty": 0.5}}, "frequencyPenalty"),
    "a penalty that the API lacks": ({"generationConfig": {"repetitionPenalty": 1.3}}, "repetitionPenalty"),
    "more samples": ({"generationConfig": {"bestOf": 4}}, "bestOf"),
    "stop tokens": ({"generationConfig": {"stopTokenIds": [3]}}, "stopTokenIds"),
    "a pattern": ({"generationConfig": {"guidedRegex": "a+"}}, "guidedRegex"),
    "a pattern in snake case": ({"generationConfig": {"guided_regex": "a+"}}, "guided_regex"),
    "a part of a token": ({"generationConfig": {"topK": 0.5}}, "generationConfig.topK"),
    "speech": ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "responseModalities"),
    "a cache": ({"cachedContent": "cachedContents/1"}, "cachedContent"),
    "a temperature": ({"generationConfig": {"temperature": -1}}, "generationConfig.temperature"),
    "an enum": ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
    "a schema for text": ({"generationConfig": {"responseSchema": {}}}, "generationConfig.responseMimeType"),
    "a schema beside functions": (
        {"generationConfig": {"responseMimeType": "application/json"}, "tools": [{"functionDeclarations": [ADD]}]},
        "generationConfig.responseMimeType",
    ),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused_by_its_field(fields: Json, param: str):
    """It is not ignored."""
    error = refusal(**{"contents": HI, **fields})

    assert isinstance(error, MalformedRequest)
    assert (error.param, error.status) == (param, 400)


def test_chunks_of_a_reply_are_one_message_and_empty_parts_none():
    """A chat of the SDK keeps a stream content by content."""
    chunks = [[{"text": "h", "thought": True}], [{"text": "m", "thought": True}], [{"text": "S"}], [{"text": "ure"}]]
    chunks += [[{"text": ""}], [called()]]
    asked = read([*HI, *({"role": "model", "parts": parts} for parts in chunks), {"parts": [response()]}])

    assert [message["role"] for message in asked.messages] == ["user", "assistant", "tool"]
    assert (asked.messages[1]["reasoning_content"], asked.messages[1]["content"]) == ("hm", "Sure")


def test_a_result_without_an_id_belongs_to_a_call_by_name_and_order():
    """Also where the calls have ids; gemini-cli writes the name in front of both."""
    calls = [called(call_id="c1"), called("sub", "sub__c2"), called(call_id="c3")]
    answers = [response("a", "sub", None), response("b", call_id=None), response("c", call_id=None)]
    of_ids = read(conversation(*calls, answered=answers)).messages
    bare = [called(call_id=None), called("sub", None), called(call_id=None)]
    of_places = read(conversation(*bare, answered=answers)).messages

    assert [call["id"] for call in of_ids[1]["tool_calls"]] == ["c1", "c2", "c3"]
    assert [message["tool_call_id"] for message in of_ids[2:]] == ["c2", "c1", "c3"]
    assert [call["id"] for call in of_places[1]["tool_calls"]] == ["call_1_0", "call_1_1", "call_1_2"]
    assert [message["tool_call_id"] for message in of_places[2:]] == ["call_1_1", "call_1_0", "call_1_2"]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ({"output": "5\n"}, "5\n"),
        ({"result": "5"}, "5"),
        ({"result": 5}, '{"result": 5}'),
        ({"error": "é"}, '{"error": "é"}'),
        ({"output": "5", "code": 0}, '{"output": "5", "code": 0}'),
        ({}, ""),
        (None, ""),
    ],
)
def test_the_text_that_a_function_returned(returned: Any, text: str):
    """What a client wraps is unwrapped; anything else is JSON."""
    answer = {"functionResponse": {"name": "add", "id": "c1", "response": returned}}
    asked = read(conversation(called(), answered=[answer]))

    assert asked.messages[-1]["content"] == text


def test_known_contents_are_recalled_and_read_again_the_same():
    """In units, lazily."""
    history = History()
    said = conversation(called(call_id=None), answered=[response(call_id=None), {"text": "so?"}])
    for extent in range(1, len(said) + 1):
        call = WireCall(json.dumps({"contents": said[:extent]}).encode(), path=PATH)
        asked = GEMINI.parse(call, DEFAULT_LIMITS, history)
        history.read(asked.messages, asked.tools, asked.recall)
    again = GEMINI.parse(call, DEFAULT_LIMITS, history)

    assert again.recall.known == len(again.messages) == 4
    assert list(again.messages) == list(read(said).messages)


def test_contents_cut_otherwise_are_not_recalled():
    """An id that a call gets by its position would be another."""
    history = History()
    cut = [*HI, *({"role": "model", "parts": [part]} for part in ({"text": "a"}, {"text": "b"}))]
    whole = [*HI, {"role": "model", "parts": [{"text": "a"}, {"text": "b"}]}]
    for contents in (cut, whole):
        said = [*contents, *HI, {"role": "model", "parts": [called(call_id=None)]}, {"parts": [{"text": "so?"}]}]
        asked = GEMINI.parse(WireCall(json.dumps({"contents": said}).encode(), path=PATH), DEFAULT_LIMITS, history)
        history.read(asked.messages, asked.tools, asked.recall)

        assert list(asked.messages) == list(read(said).messages)
        assert asked.recall.known <= 1


@pytest.mark.parametrize("form", [MEDIA_TYPE, ARRAY])
@pytest.mark.parametrize("wants_thoughts", [False, True])
@given(data=st.data(), reply=replies())
def test_a_stream_adds_up_to_the_whole_answer(form: str, wants_thoughts: bool, data: st.DataObject, reply: Json):
    """Whatever was said before the reply was known; only the last piece has a finish reason and the usage."""
    config = {"thinkingConfig": {"includeThoughts": wants_thoughts}}
    asked = read(path=STREAM, query={"alt": "sse"} if form == MEDIA_TYPE else {}, generationConfig=config)
    answer: ModelAnswer = msgspec.structs.replace(answered(reply), request=asked)
    stream = GEMINI.stream(AnswerHead(asked, RESPONSE_ID, "m", 0))
    parts = [stream.keep_alive(), *map(stream.say, data.draw(said_of(reply))), *stream.end(answer)]
    text = b"".join(parts).decode()
    pieces = (
        json.loads(text)
        if form == ARRAY
        else [json.loads(each.removeprefix("data: ")) for each in text.split("\n\n") if each]
    )
    whole = json.loads(msgspec.json.encode(GEMINI.answer(answer)))

    assert gather_parts(pieces) == whole
    assert ["finishReason" in piece["candidates"][0] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [part for part in whole["candidates"][0]["content"]["parts"] if part.get("thought")] == (
        [{"text": reply["reasoning_content"], "thought": True}]
        if wants_thoughts and reply.get("reasoning_content")
        else []
    )
    assert all(part for piece in pieces for part in piece["candidates"][0]["content"]["parts"])
    signed = [part for part in whole["candidates"][0]["content"]["parts"] if "thoughtSignature" in part]
    assert [part["thoughtSignature"] for part in signed] == [sign(answer.response_id)]


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (MalformedRequest("seed: no", param="seed"), 400, "INVALID_ARGUMENT"),
        (Unauthorized("key"), 401, "UNAUTHENTICATED"),
        (GateClosed("draining"), 503, "UNAVAILABLE"),
        (EngineUnavailable("down"), 503, "UNAVAILABLE"),
        (EngineReplyInvalid("no"), 502, "INTERNAL"),
        (HarnessError("bug"), 500, "INTERNAL"),
    ],
)
def test_an_error_has_googles_form(error: HarnessError, code: int, status: str):
    """Our own code and the field are details."""
    told = GEMINI.error_body(error, error.message, "r1")["error"]

    assert (told["code"], told["status"], told["message"]) == (code, status, error.message)
    [info] = told["details"]
    assert (info["reason"], info["metadata"]["request_id"]) == (error.code, "r1")
    assert info["metadata"].get("field") == getattr(error, "param", None)


def test_a_prompt_that_is_too_long_is_told_in_the_words_of_the_api():
    """Agents shorten the conversation at these."""
    error = PromptTooLong("long", tokens=9, context_length=8)
    told = GEMINI.error_body(error, error.message, "r1")["error"]

    assert told["message"] == "The input token count (9) exceeds the maximum number of tokens allowed (8)."
    assert (told["code"], told["status"]) == (400, "INVALID_ARGUMENT")


@pytest.mark.parametrize("form", [MEDIA_TYPE, ARRAY])
def test_a_stream_that_fails_ends_with_an_error_beside_the_events(form: str):
    """Clients of the API look for it there; an array stays one."""
    asked = read(path=STREAM, query={"alt": "sse"} if form == MEDIA_TYPE else {})
    stream = GEMINI.stream(AnswerHead(asked, RESPONSE_ID, "m", 0))
    text = (stream.keep_alive() + stream.fail(EngineUnavailable("down"), "down")).decode()
    last = json.loads(text)[-1] if form == ARRAY else json.loads(text.split("\n\n")[1])

    assert last["error"]["message"] == "down"


def test_logprobs_name_every_sampled_token():
    """The ones that were chosen."""
    asked = read(generationConfig={"responseLogprobs": True})
    answer: ModelAnswer = msgspec.structs.replace(answered({"role": "assistant", "content": "a"}), request=asked)
    told = GEMINI.answer(answer)["candidates"][0]["logprobsResult"]["chosenCandidates"]

    assert [each["tokenId"] for each in told] == answer.turn.output_ids.tolist()
    assert all(each["token"] == toy_tokenizer().token_text(each["tokenId"]) for each in told)


@pytest.mark.parametrize(
    ("path", "name", "calls"),
    [
        ("/sessions/1/v1/models/a/b:generateContent", "gemini", True),
        ("/v1beta/models/m:streamGenerateContent", "gemini", True),
        ("/sessions/1/v1beta/models/m:countTokens", "gemini", False),
        ("/v1/models", "other", False),
        ("/v1/messages", "anthropic_messages", True),
        ("/v1/messages/count_tokens", "anthropic_messages", False),
        ("/v1/responses/resp_1", "openai_responses", False),
        ("/models/" * 8_000, "other", False),
    ],
)
def test_a_path_names_its_dialect(path: str, name: str, calls: bool):
    """Also one with parameters, however long it is."""
    assert (name_dialect(path), is_call(path)) == (name, calls)


def test_another_method_is_no_route():
    """Embeddings, say."""
    with pytest.raises(HarnessError) as caught:
        read(path=PATH.replace("generateContent", "embedContent"))

    assert (caught.value.status, caught.value.code) == (404, "route_not_found")


def test_a_count_may_hold_the_whole_request():
    """As the API documents it."""
    whole = {"contents": HI, "tools": [{"functionDeclarations": [ADD]}]}
    call = WireCall(json.dumps({"generateContentRequest": whole}).encode(), path="/v1/models/m:countTokens")

    assert [each["function"]["name"] for each in parse_request(call).tools] == ["add"]
