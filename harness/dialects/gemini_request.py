"""Requests of Gemini's `generateContent`: from wire JSON to the normal form.

The path names the model and the method, and so whether the answer is streamed. Fields that affect the model are served
or refused by name; safety settings, thinking budgets and other vendor settings are ignored and noted.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from harness.decoding import json_decoder
from harness.dialects.gemini_contents import WireContent, read_unit, units_of
from harness.dialects.gemini_spelling import camel, json_schema, respell, snake
from harness.dialects.ignored import LONGEST_NOTE, MOST_NOTED, NULL, REFUSED, BodyDecoder, find_ignored, note_ignored
from harness.dialects.json_values import check_bounds, check_json, decode_json, decode_schema
from harness.dialects.model_request import (
    ModelRequest,
    RecordedText,
    Streaming,
    ToolMode,
    WireCall,
    function_tool,
    read_in_units,
    require_offered,
)
from harness.dialects.request_limits import DEFAULT_LIMITS, RequestLimits
from harness.dialects.sse import MEDIA_TYPE
from harness.errors import MalformedRequest, RouteNotFound
from harness.tokens.history import NOTHING_RECALLED, History
from harness.types import Json, SamplingWishes, TurnNotes

NAME = "gemini"
COUNT = "countTokens"
"""Method that counts a prompt."""
_ANSWER, _STREAM = "generateContent", "streamGenerateContent"
ARRAY = "application/json"
"""Media type of a stream without `alt=sse`: an array of answers."""


class _FunctionCalling(msgspec.Struct, rename="camel"):
    mode: Literal["MODE_UNSPECIFIED", "AUTO", "VALIDATED", "NONE", "ANY"] | None = None
    allowed_function_names: list[str] | None = None


class _ToolConfig(msgspec.Struct, rename="camel"):
    function_calling_config: msgspec.Raw = NULL


class _ThinkingConfig(msgspec.Struct, rename="camel"):
    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: str | None = None


class _Declaration(msgspec.Struct, rename="camel"):
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class _GenerationConfig(msgspec.Struct, rename="camel"):
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None
    response_logprobs: bool | None = None
    logprobs: int | None = None
    response_mime_type: str | None = None
    response_schema: msgspec.Raw = NULL
    response_json_schema: msgspec.Raw = NULL
    thinking_config: msgspec.Raw = NULL
    # Refused
    candidate_count: int | None = None
    response_modalities: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class _GeminiBody(msgspec.Struct, rename="camel"):
    contents: list[WireContent] = []
    system_instruction: WireContent | None = None
    tools: list[msgspec.Raw] | None = None
    tool_config: msgspec.Raw = NULL
    generation_config: msgspec.Raw = NULL
    generate_content_request: msgspec.Raw = NULL
    # Served by the path
    model: msgspec.Raw = NULL
    # Refused
    cached_content: msgspec.Raw = NULL


_SETTINGS = {"safety_settings": (b"[]",)}
_TOOL_MODES: Mapping[str, ToolMode] = {
    "MODE_UNSPECIFIED": ToolMode.AUTO,
    "AUTO": ToolMode.AUTO,
    "VALIDATED": ToolMode.AUTO,  # it may call or not, as with AUTO; sampling is not constrained
    "NONE": ToolMode.NONE,
    "ANY": ToolMode.REQUIRED,
}
_CHOICE = "toolConfig.functionCallingConfig"
_FUNCTIONS = "functionDeclarations"

_T = TypeVar("_T", bound=msgspec.Struct)
_decoder = BodyDecoder(_GeminiBody, snake, _SETTINGS)
_generation_decoder = BodyDecoder(_GenerationConfig, snake)
_thinking_decoder = BodyDecoder(_ThinkingConfig, snake)
_tool_config_decoder = BodyDecoder(_ToolConfig, snake)
_choice_decoder = BodyDecoder(_FunctionCalling, snake)
_tool_decoder = json_decoder(dict[str, msgspec.Raw])
_list_decoder = json_decoder(list[msgspec.Raw] | None)
_function_decoder = json_decoder(_Declaration)


def parse_request(
    call: WireCall, limits: RequestLimits = DEFAULT_LIMITS, history: History | None = None
) -> ModelRequest:
    model, _, method = call.path.partition("/models/")[2].rpartition(":")
    if method not in (_ANSWER, _STREAM, COUNT, ""):
        raise RouteNotFound(f"{method[:64]}: expected {_ANSWER}, {_STREAM} or {COUNT}, nothing else is served")
    wire, unknown = _decode(_decoder, call.body)
    if wire.generate_content_request != NULL:
        wire, unknown = _decode(_decoder, wire.generate_content_request)
    limits.require("messages", len(wire.contents), "contents")
    config, unknown_settings = _decode(_generation_decoder, wire.generation_config, "generationConfig")
    thinking, unknown_thinking = _decode(_thinking_decoder, config.thinking_config, "generationConfig.thinkingConfig")
    tool_config, unknown_config = _decode(_tool_config_decoder, wire.tool_config, "toolConfig")
    choice, unknown_choice = _decode(_choice_decoder, tool_config.function_calling_config, _CHOICE)
    unknown += unknown_settings + unknown_thinking + unknown_config + unknown_choice
    _refuse_unsupported(wire, config)
    offer = _group_tools(wire.tools or (), limits)
    functions = offer.pop(_FUNCTIONS, [])
    units = units_of(wire.system_instruction, wire.contents)
    limits.require("messages", sum(len(parts) for unit in units for parts in unit.contents), "contents")
    recall = NOTHING_RECALLED
    if history is not None:
        recall = history.recall(NAME, wire.tools or (), [unit.raw for unit in units])
    tools = _read_functions(functions, limits) if recall.tools is None else recall.tools
    record = RecordedText(call, limits, recall.characters)
    new = [read_unit(unit, record) for unit in call.paced(units[len(recall.counts) :])]
    messages = read_in_units(recall, new, lambda number: read_unit(units[number], RecordedText(call, limits)))
    if not wire.contents:
        raise MalformedRequest("contents: expected at least one content, got none", param="contents")
    limits.require("messages", len(messages), "contents")
    mode, name = _read_choice(choice, tools)
    ignored = find_ignored(wire, _SETTINGS, (), unknown) | _find_budgets(thinking)
    form = MEDIA_TYPE if call.query.get("alt") == "sse" else ARRAY
    request = ModelRequest(
        dialect=NAME,
        messages=messages,
        tools=tools,
        tool_mode=mode,
        tool_name=name,
        sampling=SamplingWishes(
            max_new_tokens=config.max_output_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=None if config.top_k is None else int(config.top_k),
            seed=config.seed,
            stop=tuple(text for text in config.stop_sequences or () if text),
            top_logprobs=config.logprobs if config.response_logprobs else None,
            json_schema=_read_schema(config, limits, has_tools=bool(tools)),
        ),
        wants_logprobs=bool(config.response_logprobs),
        model=model,
        wants_reasoning=bool(thinking.include_thoughts),
        streaming=Streaming(wants_usage=True, media_type=form) if method == _STREAM else None,
        recall=recall.with_read([len(each) for each in new]) if recall.digests else recall,
        notes=TurnNotes(ignored=note_ignored(ignored), left_out=tuple(offer)[:MOST_NOTED]),
        ignored=tuple(ignored),
    )
    limits.check(messages, tools, request.sampling, recall)
    return request


def _decode(decoder: BodyDecoder[_T], raw: bytes | msgspec.Raw, within: str = "") -> tuple[_T, list[str]]:
    """Return the field `within`, or the body, and the unknown fields. Raises `MalformedRequest`."""
    found, unknown = decoder.decode(raw, within)
    if any("_" in name for name in unknown):
        found, others = decoder.decode(respell(raw, 1), within)
        kept = {*others}
        unknown = [name for name in unknown if camel(name) in kept]
    return found, unknown


def _refuse_unsupported(wire: _GeminiBody, config: _GenerationConfig) -> None:
    refusals: tuple[tuple[str, object, tuple[object, ...], str], ...] = (
        ("cachedContent", bytes(wire.cached_content), (b"null", b'""'), "none; send the contents"),
        ("candidateCount", config.candidate_count, (None, 1), "1; create one session per sample"),
        ("presencePenalty", config.presence_penalty, (None, 0), f"0, {REFUSED['presence_penalty']}"),
        ("frequencyPenalty", config.frequency_penalty, (None, 0), f"0, {REFUSED['frequency_penalty']}"),
        ("responseModalities", config.response_modalities, (None, [], ["TEXT"]), "TEXT: nothing else can be recorded"),
        ("generationConfig.topK", (config.top_k or 0) % 1, (0,), f"a whole number, got {config.top_k}"),
    )
    for name, value, neutral, expected in refusals:
        if value not in neutral:
            raise MalformedRequest(f"{name}: expected {expected}", param=name)
    check_bounds("generationConfig.temperature", config.temperature, 0, 100)
    check_bounds("generationConfig.topP", config.top_p, 1e-9, 1)
    check_bounds("generationConfig.topK", config.top_k, 0, 2**31 - 1)
    check_bounds("generationConfig.maxOutputTokens", config.max_output_tokens, 1, 2**31 - 1)
    check_bounds("generationConfig.seed", config.seed, -(2**63), 2**63 - 1)
    check_bounds("generationConfig.logprobs", config.logprobs, 0, 2**31 - 1)


def _group_tools(raws: Sequence[msgspec.Raw], limits: RequestLimits) -> dict[str, list[msgspec.Raw]]:
    """Return the declarations of functions, and under their own names the tools that only the vendor can run."""
    limits.require_tools(raws)
    found: dict[str, list[msgspec.Raw]] = {}
    for number, raw in enumerate(raws):
        for name, value in decode_json(_tool_decoder, raw, f"tools[{number}]").items():
            if camel(name) == _FUNCTIONS:
                declared: list[msgspec.Raw] | None = decode_json(_list_decoder, value, f"tools[{number}].{name}")
                found.setdefault(_FUNCTIONS, []).extend(declared or ())
            elif value != NULL:
                found[name[:LONGEST_NOTE]] = []
    return found


def _read_functions(raws: Sequence[msgspec.Raw], limits: RequestLimits) -> tuple[Json, ...]:
    limits.require("tools", len(raws), "tools")
    tools: dict[str, Json] = {}
    for number, raw in enumerate(raws):
        place = f"tools.{_FUNCTIONS}[{number}]"
        said = decode_json(_function_decoder, respell(raw), place)
        if not said.name or said.name in tools:
            wrong = "duplicate name" if said.name else "expected the name of the function, got none"
            raise MalformedRequest(f"{place}.name: {wrong}", param=f"{place}.name")
        check_json([said.parameters, said.parameters_json_schema], place, limits.json_depth)
        parameters = said.parameters_json_schema or json_schema(said.parameters)
        tools[said.name] = function_tool(said.name, said.description, parameters)
    return tuple(tools.values())


def _read_choice(choice: _FunctionCalling, tools: Sequence[Json]) -> tuple[ToolMode, str | None]:
    names = dict.fromkeys(choice.allowed_function_names or ())
    mode = _TOOL_MODES[choice.mode or "AUTO"]
    if mode is ToolMode.REQUIRED and not tools:
        raise MalformedRequest(f"{_CHOICE}.mode: 'ANY' needs functions, got none", param=f"{_CHOICE}.mode")
    param = f"{_CHOICE}.allowedFunctionNames"
    for name in names:
        require_offered(name, tools, param)
    if not names or len(names) == len(tools):
        return mode, None
    if mode is not ToolMode.REQUIRED or len(names) > 1:
        expected = "expected all functions, or one with mode 'ANY'; declare only those that may be called"
        raise MalformedRequest(f"{param}: {expected}", param=param)
    return mode, next(iter(names))


def _read_schema(config: _GenerationConfig, limits: RequestLimits, *, has_tools: bool) -> str | None:
    raw = config.response_json_schema if config.response_schema == NULL else config.response_schema
    kind = config.response_mime_type or "text/plain"
    param = "generationConfig.responseMimeType"
    if kind == "text/plain" and raw == NULL:
        return None
    if kind != "application/json":
        raise MalformedRequest(
            f"{param}: expected text/plain, or application/json with a schema or without", param=param
        )
    if has_tools:
        raise MalformedRequest(f"{param}: expected no tools with {kind}, whose answers call none", param=param)
    if raw == NULL:
        return '{"type":"object"}'
    param = "generationConfig.responseSchema"
    schema = decode_schema(raw, limits, param, param)
    return msgspec.json.encode(json_schema(schema) if raw is config.response_schema else schema).decode()


def _find_budgets(thinking: _ThinkingConfig) -> Json:
    stated = {"thinkingBudget": thinking.thinking_budget, "thinkingLevel": thinking.thinking_level}
    return {f"generationConfig.thinkingConfig.{name}": value for name, value in stated.items() if value is not None}
