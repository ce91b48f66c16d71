"""Requests of Anthropic Messages: from wire JSON to the normal form.

Fields that affect the model are served or refused by name. Vendor settings (caching, thinking budgets, metadata) are
ignored and noted.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from harness.decoding import json_decoder
from harness.dialects.anthropic_blocks import BlockReader, WireMessage, units_of
from harness.dialects.ignored import LONGEST_NOTE, MOST_NOTED, NULL, BodyDecoder, Settings, find_ignored, note_ignored
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
from harness.errors import MalformedRequest
from harness.tokens.history import NOTHING_RECALLED, History
from harness.types import Json, SamplingWishes, TurnNotes

NAME = "anthropic_messages"
_EFFORT = "output_config.effort"


class _MessagesTool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = False


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: msgspec.Raw


class _OutputConfig(msgspec.Struct):
    format: _OutputFormat | None = None
    effort: str | None = None


class _MessagesBody(msgspec.Struct):
    messages: list[WireMessage]
    model: str = ""
    max_tokens: int | None = None
    system: msgspec.Raw = msgspec.Raw(b"null")
    tools: list[msgspec.Raw] | None = None
    tool_choice: _ToolChoice | None = None
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: msgspec.Raw = NULL
    output_format: _OutputFormat | None = None
    # Refused
    mcp_servers: list[msgspec.Raw] | None = None
    container: str | dict[str, msgspec.Raw] | None = None


_SETTINGS: Settings = {"thinking": (), "context_management": (), "service_tier": ()}
_MEANINGLESS = ("metadata",)
_NOTED_HEADERS = ("anthropic-beta",)

_TOOL_MODES: Mapping[str, ToolMode] = {
    "auto": ToolMode.AUTO,
    "none": ToolMode.NONE,
    "any": ToolMode.REQUIRED,
    "tool": ToolMode.REQUIRED,
}

_decoder = BodyDecoder(_MessagesBody, ignored=(*_SETTINGS, *_MEANINGLESS))
_config_decoder = BodyDecoder(_OutputConfig)
_tool_decoder = json_decoder(_MessagesTool)


def parse_request(
    call: WireCall, limits: RequestLimits = DEFAULT_LIMITS, history: History | None = None
) -> ModelRequest:
    wire, unknown = _decoder.decode(call.body)
    config, of_config = _config_decoder.decode(wire.output_config, "output_config")
    limits.require("messages", len(wire.messages), "messages")
    _refuse_unsupported(wire)
    raws = wire.tools or ()
    units = units_of(wire.system, call.paced(wire.messages))
    effort = config.effort
    recall = NOTHING_RECALLED
    if history is not None:
        told = raws if effort is None else [*raws, msgspec.Raw(msgspec.json.encode(effort))]
        recall = history.recall(NAME, told, [unit.raw for unit in call.paced(units)])
    if recall.tools is None or len(recall.tools) < len(raws):  # the notes of every turn name those that are left out
        offer = _read_tools(raws, limits)
    else:
        offer = _OfferedTools(recall.tools, {}, ())
    if offer.deferred:  # which of them are offered depends on all messages
        recall = NOTHING_RECALLED
    reader = BlockReader(RecordedText(call, limits, recall.characters))
    new = [reader.read(unit) for unit in call.paced(units[len(recall.counts) :])]
    messages = read_in_units(recall, new, lambda number: BlockReader(RecordedText(call, limits)).read(units[number]))
    if not wire.messages or not messages:
        raise MalformedRequest("messages: expected at least one message, got none", param="messages")
    limits.require("messages", len(messages), "messages")
    tools = (*offer.tools, *(tool for name, tool in offer.deferred.items() if name in reader.references))
    ignored = _find_ignored(wire, config, [*unknown, *of_config])
    request = ModelRequest(
        dialect=NAME,
        messages=messages,
        tools=tools,
        tool_mode=_TOOL_MODES[wire.tool_choice.type if wire.tool_choice else "auto"],
        tool_name=_read_tool_name(wire.tool_choice, tools),
        sampling=SamplingWishes(
            max_new_tokens=wire.max_tokens,
            temperature=wire.temperature,
            top_p=wire.top_p,
            top_k=wire.top_k,
            stop=tuple(text for text in wire.stop_sequences or () if text),
            json_schema=_read_schema(wire, config.format or wire.output_format, limits),
        ),
        wants_logprobs=False,
        model=wire.model,
        streaming=Streaming(wants_usage=True) if wire.stream else None,
        recall=recall.with_read([len(each) for each in new]) if recall.digests else recall,
        notes=_notes(call, ignored, offer, reader),
        ignored=tuple(ignored),
        effort=None if effort is None else (_EFFORT, effort),
    )
    limits.check(messages, tools, request.sampling, recall)
    return request


class _OfferedTools(NamedTuple):
    tools: Sequence[Json]
    deferred: Mapping[str, Json]
    """Tools offered once a result refers to them, by name."""
    left_out: Sequence[str]
    """Tools that only the vendor can run."""


def _read_tools(raws: Sequence[msgspec.Raw], limits: RequestLimits) -> _OfferedTools:
    limits.require_tools(raws)
    tools: list[Json] = []
    deferred: dict[str, Json] = {}
    left_out: list[str] = []
    names: set[str] = set()
    for number, raw in enumerate(raws):
        tool = decode_json(_tool_decoder, raw, f"tools[{number}]")
        if tool.type not in (None, "custom"):
            left_out.append((tool.name or tool.type or "")[:LONGEST_NOTE])
            continue
        if not tool.name or tool.name in names:
            param = f"tools[{number}].name"
            wrong = "duplicate name" if tool.name else "expected the name of the tool, got none"
            raise MalformedRequest(f"{param}: {wrong}", param=param)
        names.add(tool.name)
        schema = tool.input_schema
        if tool.input_examples:
            schema = {**(schema or {}), "examples": tool.input_examples}
        check_json(schema, "tools", limits.json_depth)
        formed = function_tool(tool.name, tool.description, schema, tool.strict)
        if tool.defer_loading:
            deferred[tool.name] = formed
        else:
            tools.append(formed)
    return _OfferedTools(tools, deferred, left_out)


def _read_tool_name(choice: _ToolChoice | None, tools: Sequence[Json]) -> str | None:
    """Return the function that must be called; None for any. Raises `MalformedRequest` if it is not offered."""
    if choice is not None and choice.type == "any" and not tools:
        raise MalformedRequest("tool_choice: 'any' needs tools, got none", param="tool_choice")
    if choice is None or choice.type != "tool":
        return None
    require_offered(choice.name or "", tools)
    return choice.name


def _read_schema(wire: _MessagesBody, wanted: _OutputFormat | None, limits: RequestLimits) -> str | None:
    if wanted is None:
        return None
    if wire.tools:
        raise MalformedRequest(
            "output_config.format: expected no tools with a schema, whose answers call none",
            param="output_config.format",
        )
    schema = decode_schema(wanted.schema, limits, "output_config.format", "output_config.format.schema")
    return msgspec.json.encode(schema).decode()


def _refuse_unsupported(wire: _MessagesBody) -> None:
    for name in ("mcp_servers", "container"):
        if getattr(wire, name):
            raise MalformedRequest(
                f"{name}: expected none, only the vendor could run what it offers; send tools that the client runs",
                param=name,
            )
    check_bounds("max_tokens", wire.max_tokens, 1, 2**31 - 1)
    check_bounds("temperature", wire.temperature, 0, 100)
    check_bounds("top_p", wire.top_p, 1e-9, 1)
    check_bounds("top_k", wire.top_k, 0, 2**31 - 1)


def _find_ignored(wire: _MessagesBody, config: _OutputConfig, unknown: Sequence[str]) -> Json:
    ignored = find_ignored(wire, _SETTINGS, _MEANINGLESS, unknown)
    if config.effort is not None:
        ignored[_EFFORT] = config.effort[:LONGEST_NOTE]
    if wire.tool_choice is not None and wire.tool_choice.disable_parallel_tool_use:
        ignored["tool_choice.disable_parallel_tool_use"] = True
    return ignored


def _notes(call: WireCall, ignored: Json, offer: _OfferedTools, reader: BlockReader) -> TurnNotes:
    headers = {name: call.headers[name][:LONGEST_NOTE] for name in _NOTED_HEADERS if call.headers.get(name)}
    return TurnNotes(
        ignored=note_ignored(ignored | headers), normalized=reader.aliases, left_out=tuple(offer.left_out[:MOST_NOTED])
    )
