"""Requests of OpenAI Chat Completions: from wire JSON to the normal form.

It accepts all that clients really send: unknown fields are noted, text parts joined, empty values dropped, so that a
history sent back normalizes to what was served. It refuses by name, and never ignores, what cannot be served: several
choices, images, a schema beside tools.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, get_args

import msgspec

from harness.decoding import json_decoder
from harness.dialects.ignored import LONGEST_NOTE, NULL, REFUSED, BodyDecoder, Settings, find_ignored, note_ignored
from harness.dialects.json_values import check_bounds, check_json, decode_json, decode_schema
from harness.dialects.known_beginning import BodyWithMessages, decode_body
from harness.dialects.model_request import (
    ModelRequest,
    PartlyRead,
    Streaming,
    ToolMode,
    WireCall,
    check_calls,
    require_offered,
    said_arguments,
)
from harness.dialects.request_limits import DEFAULT_LIMITS, RequestLimits
from harness.errors import MalformedRequest
from harness.tokens.history import NOTHING_RECALLED, History
from harness.types import Json, Message, Paced, SamplingWishes, TurnNotes

NAME = "openai_chat"
_EFFORT = "reasoning.effort"


class _TextPart(msgspec.Struct):
    type: Literal["text"]
    text: str


class _ChatFunction(msgspec.Struct):
    name: str
    arguments: str | None = None


# Fields in OpenAI's order: a template that writes a call or a tool as JSON shows the model what it was trained on.


class _Call(msgspec.Struct, kw_only=True):
    id: str = ""
    type: Literal["function"] = "function"
    function: _ChatFunction


class _Detail(msgspec.Struct):
    type: str | None = None
    text: str | None = None


_Role = Literal["system", "developer", "user", "assistant", "tool"]


class _WireMessage(msgspec.Struct):
    role: _Role
    content: str | list[_TextPart] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: msgspec.Raw = NULL
    reasoning_details: msgspec.Raw = NULL
    name: str | None = None
    refusal: str | None = None
    # Refused
    function_call: msgspec.Raw = NULL
    prefix: msgspec.Raw = NULL
    partial: msgspec.Raw = NULL
    audio: msgspec.Raw = NULL


class _ToolFunction(msgspec.Struct, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"] = "function"
    function: _ToolFunction


class _NamedFunction(msgspec.Struct):
    name: str


class _NamedTool(msgspec.Struct):
    function: _NamedFunction
    type: Literal["function"] = "function"


class _JsonSchema(msgspec.Struct):
    schema: msgspec.Raw


class _ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: _JsonSchema | None = None
    schema: msgspec.Raw = NULL
    """Schema in the place where Together, Fireworks and llama.cpp have it."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class _Effort(msgspec.Struct):
    """Wish in the form of OpenRouter."""

    effort: str | None = None
    max_tokens: int | None = None


class _ChatBody(BodyWithMessages):
    # Messages and tools stay raw: a decoder holds the interpreter until it is done, and a body over the limits is
    # refused before its pieces are decoded.
    model: str = ""
    tools: list[msgspec.Raw] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedTool | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: _ResponseFormat | None = None
    logit_bias: dict[str, float] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: msgspec.Raw = NULL
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


_SETTINGS: Settings = {
    "parallel_tool_calls": (b"true",),
    "verbosity": (),
    "service_tier": (b'"auto"', b'"default"'),
    "store": (b"false",),
}
_MEANINGLESS = ("metadata", "user", "safety_identifier", "prompt_cache_key")

_REFUSED_IN_MESSAGES: Mapping[str, str] = {
    "function_call": "calls are `tool_calls`",
    "audio": "nothing but text can be recorded",
    **dict.fromkeys(("prefix", "partial"), REFUSED["continue_final_message"]),
}
_decoder = BodyDecoder(_ChatBody, ignored=(*_SETTINGS, *_MEANINGLESS))
_reasoning_decoder = BodyDecoder(_Effort)
_message_decoder = json_decoder(_WireMessage)
_tool_decoder = json_decoder(_Tool)
_object_decoder = json_decoder(dict[str, Any])
_text_decoder: msgspec.json.Decoder[str | None] = json_decoder(str | None)
_details_decoder: msgspec.json.Decoder[list[_Detail] | None] = json_decoder(list[_Detail] | None)


def parse_request(
    call: WireCall, limits: RequestLimits = DEFAULT_LIMITS, history: History | None = None
) -> ModelRequest:
    wire, unknown, sent = decode_body(_decoder, call, history)
    raws = sent.messages
    limits.require("messages", len(raws), "messages")
    variables = _read_variables(wire, limits)
    has_parts = bytes(memoryview(wire.reasoning)[:1]) == b"{"
    reasoning, of_reasoning = _reasoning_decoder.decode(wire.reasoning if has_parts else NULL, "reasoning")
    whole = () if has_parts or wire.reasoning == NULL else ("reasoning",)
    effort = {} if reasoning.effort is None else {_EFFORT: reasoning.effort}
    recall = NOTHING_RECALLED
    if history is not None:
        told = variables | effort
        tools_sent = [*(wire.tools or ()), *([msgspec.Raw(msgspec.json.encode(told))] if told else ())]
        recall = history.recall(NAME, tools_sent, raws, sent.begins)._replace(sent=call.sent, elements=sent.elements)
    messages = _read_messages(raws, recall.known, call.paced)
    read = ((f"messages[{i}]", messages[i]) for i in range(recall.known, len(messages)))
    check_calls(read)
    tools = _read_tools(wire.tools or (), limits) if recall.tools is None else recall.tools
    _refuse_unsupported(wire)
    choice, options = wire.tool_choice, wire.stream_options
    ignored = find_ignored(wire, _SETTINGS, _MEANINGLESS, [*unknown, *of_reasoning, *whole])
    ignored |= {name: level[:LONGEST_NOTE] for name, level in effort.items()}
    if reasoning.max_tokens is not None:
        ignored["reasoning.max_tokens"] = reasoning.max_tokens
    stop = [wire.stop] if isinstance(wire.stop, str) else wire.stop or []
    request = ModelRequest(
        dialect=NAME,
        messages=messages,
        tools=tools,
        tool_mode=ToolMode.REQUIRED if isinstance(choice, _NamedTool) else ToolMode(choice or "auto"),
        tool_name=_read_tool_name(wire, tools),
        sampling=SamplingWishes(
            max_new_tokens=wire.max_completion_tokens or wire.max_tokens,
            temperature=wire.temperature,
            top_p=wire.top_p,
            top_k=None if wire.top_k is None else max(0, wire.top_k),
            min_p=wire.min_p,
            seed=wire.seed,
            stop=tuple(text for text in stop if text),
            top_logprobs=wire.top_logprobs if wire.logprobs else None,
            min_new_tokens=wire.min_tokens,
            json_schema=_read_schema(wire, limits),
        ),
        wants_logprobs=bool(wire.logprobs),
        model=wire.model,
        streaming=Streaming(bool(options is not None and options.include_usage)) if wire.stream else None,
        recall=recall,
        notes=TurnNotes(ignored=note_ignored(ignored)),
        ignored=tuple(ignored),
        template_variables=variables,
        effort=next(iter(effort.items()), None),
    )
    limits.check(messages, tools, request.sampling, recall)
    return request


def _refuse_unsupported(wire: _ChatBody) -> None:
    if not wire.messages:
        raise MalformedRequest("messages: expected at least one message, got none", param="messages")
    if wire.n not in (None, 1):
        raise MalformedRequest(f"n: expected 1, got {wire.n}; create one session per sample", param="n")
    if wire.logit_bias:
        raise MalformedRequest("logit_bias: expected none, such tokens could not be trained", param="logit_bias")
    for param, neutral in (("repetition_penalty", 1), ("frequency_penalty", 0), ("presence_penalty", 0)):
        if getattr(wire, param) not in (None, neutral):
            raise MalformedRequest(f"{param}: expected {neutral}, {REFUSED[param]}", param=param)
    if wire.stream_options is not None and not wire.stream:
        raise MalformedRequest("stream_options: expected only with stream = true", param="stream_options")
    bounds: tuple[tuple[str, float, float], ...] = (
        ("temperature", 0, 100),
        ("top_p", 1e-9, 1),
        ("top_k", -1, 2**31 - 1),
        ("min_p", 0, 1),
        ("max_tokens", 1, 2**31 - 1),
        ("max_completion_tokens", 1, 2**31 - 1),
        ("min_tokens", 0, wire.max_completion_tokens or wire.max_tokens or 2**31 - 1),
        ("top_logprobs", 0, 2**31 - 1),
        ("seed", -(2**63), 2**63 - 1),
    )
    for name, low, high in bounds:
        check_bounds(name, getattr(wire, name), low, high)


def _read_variables(wire: _ChatBody, limits: RequestLimits) -> Json:
    variables = dict(wire.chat_template_kwargs or {})
    limits.require("schema_bytes", len(msgspec.json.encode(variables)), "chat_template_kwargs")
    check_json(variables, "chat_template_kwargs", limits.json_depth)
    return variables if wire.reasoning_effort is None else {"reasoning_effort": wire.reasoning_effort, **variables}


def _read_messages(raws: Sequence[msgspec.Raw], known: int, paced: Paced) -> Sequence[Message]:
    def read(number: int) -> Message:
        return _read_message(raws[number], number)

    new = tuple(map(read, paced(range(known, len(raws)))))
    return PartlyRead(known, new, read) if known else new


def _read_message(raw: msgspec.Raw, number: int) -> Message:
    try:
        said = decode_json(_message_decoder, raw, f"messages[{number}]")
    except MalformedRequest as error:
        param = error.param or ""
        if param.endswith(".role"):
            expected = f"expected one of {', '.join(get_args(_Role))}"
        elif param.endswith(".type") and ".content[" in param:
            expected = "expected a text: nothing else can be recorded"
        else:
            raise
        raise MalformedRequest(f"{error.message}; {expected}", param=param) from error
    content = said.content if isinstance(said.content, str) else "".join(part.text for part in said.content or ())
    _refuse_in_message(said, number)
    message: Json = {"role": said.role, "content": content or said.refusal or ""}
    if said.tool_calls:
        for call in said.tool_calls:
            call.function.arguments = said_arguments(call.function.arguments)
        message["tool_calls"] = msgspec.to_builtins(said.tool_calls)
    if reasoning := said.reasoning_content or (_read_reasoning(said) if said.role == "assistant" else ""):
        message["reasoning_content"] = reasoning
    if said.tool_call_id:
        message["tool_call_id"] = said.tool_call_id
    if said.name:
        message["name"] = said.name
    return message


def _refuse_in_message(said: _WireMessage, number: int) -> None:
    for name, expected in _REFUSED_IN_MESSAGES.items():
        if bytes(getattr(said, name)) not in (b"null", b"false"):
            field = f"messages[{number}].{name}"
            raise MalformedRequest(f"{field}: expected none, {expected}", param=field)


def _read_reasoning(said: _WireMessage) -> str:
    """Return a reply's reasoning under the names of vLLM or OpenRouter; empty if it is no text."""
    if said.reasoning is NULL and said.reasoning_details is NULL:
        return ""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if text := _text_decoder.decode(said.reasoning):
            return text
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        details = _details_decoder.decode(said.reasoning_details) or ()
        return "".join(detail.text or "" for detail in details if detail.type in (None, "reasoning.text"))
    return ""


def _read_tools(raws: Sequence[msgspec.Raw], limits: RequestLimits) -> tuple[Json, ...]:
    limits.require_tools(raws)
    tools = [decode_json(_tool_decoder, raw, f"tools[{i}]") for i, raw in enumerate(raws)]
    formed: dict[str, Json] = {}
    for i, tool in enumerate(tools):
        function = tool.function
        if function.name in formed:
            field = f"tools[{i}].function.name"
            raise MalformedRequest(f"{field}: duplicate name", param=field)
        # A function may say more, such as `return`, which templates show.
        more = decode_json(_object_decoder, raws[i])["function"]
        stated = msgspec.to_builtins(function)
        more = {name: value for name, value in more.items() if name not in function.__struct_fields__}
        formed[function.name] = {"type": tool.type, "function": stated | more}
        check_json(formed[function.name], "tools", limits.json_depth)
    return tuple(formed.values())


def _read_tool_name(wire: _ChatBody, tools: Sequence[Json]) -> str | None:
    if wire.tool_choice == "required" and not tools:
        raise MalformedRequest("tool_choice: 'required' needs tools, got none", param="tool_choice")
    if not isinstance(wire.tool_choice, _NamedTool):
        return None
    name = wire.tool_choice.function.name
    require_offered(name, tools)
    return name


def _read_schema(wire: _ChatBody, limits: RequestLimits) -> str | None:
    wanted = wire.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wire.tools:
        raise MalformedRequest(
            f"response_format: expected no tools with type {wanted.type!r}, whose answers call none",
            param="response_format",
        )
    raw = wanted.schema if wanted.json_schema is None else wanted.json_schema.schema
    if raw == NULL and wanted.type == "json_object":
        return '{"type":"object"}'
    if raw == NULL:
        raise MalformedRequest("response_format.json_schema: expected with type 'json_schema'", param="response_format")
    schema = decode_schema(raw, limits, "response_format", "response_format.json_schema.schema")
    return msgspec.json.encode(schema).decode()
