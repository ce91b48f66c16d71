"""Requests of OpenAI Responses in the normal form. Fields that cannot be served are refused by name."""

from typing import Literal

import msgspec

from harness.dialects.ignored import LONGEST_NOTE, MOST_NOTED, NULL, BodyDecoder, Settings, find_ignored, note_ignored
from harness.dialects.json_values import check_bounds, decode_schema
from harness.dialects.model_request import ModelRequest, PartlyRead, RecordedText, Streaming, ToolMode, WireCall
from harness.dialects.openai_responses_items import group_items, read_message
from harness.dialects.openai_responses_tools import CALL_KINDS, CallForm, ToolList
from harness.dialects.request_limits import DEFAULT_LIMITS, RequestLimits
from harness.errors import MalformedRequest, PreviousResponseNotFound
from harness.tokens.history import NOTHING_RECALLED, History
from harness.types import Json, Message, SamplingWishes, TurnNotes

NAME = "openai_responses"
ID_PREFIX = "resp_"
"""Prefix of the 32 hex digits of a response id."""

_EFFORT = "reasoning.effort"
_LOGPROBS = "message.output_text.logprobs"


class _ForcedTool(msgspec.Struct):
    type: str
    name: str = ""
    namespace: str | None = None


class _TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: msgspec.Raw = NULL


class _Text(msgspec.Struct):
    format: _TextFormat | None = None
    verbosity: str | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _ResponsesBody(msgspec.Struct):
    input: str | list[msgspec.Raw] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ForcedTool | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    max_output_tokens: int | None = None
    text: msgspec.Raw = NULL
    include: list[str] | None = None
    reasoning: msgspec.Raw = NULL
    # Served by what is done anyway
    stream_options: msgspec.Raw = NULL
    store: msgspec.Raw = NULL
    # Refused
    background: bool | None = None
    conversation: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL
    n: int | None = 1
    logit_bias: msgspec.Raw = NULL
    modalities: list[str] | None = None


_SETTINGS: Settings = {
    "parallel_tool_calls": (b"true",),
    "max_tool_calls": (),
    "service_tier": (),
    "truncation": (b'"disabled"',),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
}
_MEANINGLESS = ("metadata", "client_metadata", "user", "safety_identifier")

_decoder = BodyDecoder(_ResponsesBody, ignored=(*_SETTINGS, *_MEANINGLESS))
_reasoning_decoder = BodyDecoder(_Reasoning)
_text_decoder = BodyDecoder(_Text)


def parse_request(
    call: WireCall, limits: RequestLimits = DEFAULT_LIMITS, history: History | None = None
) -> ModelRequest:
    """Parse `call`; see `Dialect.parse`. Also raises `PreviousResponseNotFound`."""
    wire, unknown = _decoder.decode(call.body)
    reasoning, of_reasoning = _reasoning_decoder.decode(wire.reasoning, "reasoning")
    wanted, of_text = _text_decoder.decode(wire.text, "text")
    _refuse_unsupported(wire)
    before = _read_before(wire, call)
    text = [{"role": "user", "content": wire.input}] if isinstance(wire.input, str) else []
    raws = list(map(_raw, text)) if isinstance(wire.input, str) else wire.input or []
    limits.require("messages", len(before) + len(raws), "input")
    groups = group_items(raws, before, call.answered_as)
    tool_list = ToolList(wire.tools or (), limits)
    effort = reasoning.effort
    recall = NOTHING_RECALLED
    if history is not None:
        # In a list of one, because the same bytes may mean something else as an item.
        begins = [_raw([message]) for message in before]
        raws = [*(wire.tools or ()), *([] if effort is None else [_raw(effort)])]
        recall = history.recall(NAME, raws, [*begins, *(group.raw for group in groups)])
    tools = tool_list.read() if recall.tools is None else recall.tools

    def read(number: int, record: RecordedText | None = None) -> Message:
        behind = number - len(before)
        return before[number] if behind < 0 else read_message(groups[behind], record or RecordedText(call, limits))

    record = RecordedText(call, limits, recall.characters)
    new = tuple(read(number, record) for number in call.paced(range(recall.known, len(before) + len(groups))))
    messages = PartlyRead(recall.known, new, read) if recall.known else new
    if not messages:
        raise MalformedRequest("input: expected at least one item, got none", param="input")
    wants_logprobs = _LOGPROBS in (wire.include or ())
    mode, name = _read_choice(wire, tool_list)
    ignored = find_ignored(wire, _SETTINGS, _MEANINGLESS, [*unknown, *of_reasoning, *of_text])
    inner = {_EFFORT: effort, "text.verbosity": wanted.verbosity}
    ignored |= {name: value[:LONGEST_NOTE] for name, value in inner.items() if value is not None}
    request = ModelRequest(
        dialect=NAME,
        messages=messages,
        tools=tools,
        tool_mode=mode,
        tool_name=name,
        sampling=SamplingWishes(
            max_new_tokens=wire.max_output_tokens,
            temperature=wire.temperature,
            top_p=wire.top_p,
            top_logprobs=wire.top_logprobs if wants_logprobs else None,
            json_schema=_read_schema(wanted.format, tool_list, limits),
        ),
        wants_logprobs=wants_logprobs,
        model=wire.model or "",
        streaming=Streaming(wants_usage=True) if wire.stream else None,
        recall=recall,
        notes=_notes(wire, ignored, tool_list),
        ignored=tuple(ignored),
        effort=None if effort is None else (_EFFORT, effort),
    )
    limits.check(messages, tools, request.sampling, recall)
    return request


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _refuse_unsupported(wire: _ResponsesBody) -> None:
    refusals = (
        ("background", wire.background, "expected false: an answer goes to the request itself"),
        ("conversation", _is_given(wire.conversation), "expected none; send the items, or previous_response_id"),
        ("prompt", _is_given(wire.prompt), "expected none; send its text as instructions and input"),
        ("n", wire.n not in (None, 1), "expected 1; create one session per sample"),
        ("logit_bias", _is_given(wire.logit_bias), "expected none: tokens must be sampled from the model itself"),
        ("modalities", wire.modalities not in (None, [], ["text"]), "expected text: nothing else can be recorded"),
    )
    for name, is_asked, message in refusals:
        if is_asked:
            raise MalformedRequest(f"{name}: {message}", param=name)
    bounds: tuple[tuple[str, float, float], ...] = (
        ("temperature", 0, 100),
        ("top_p", 1e-9, 1),
        ("top_logprobs", 0, 2**31 - 1),
        ("max_output_tokens", 1, 2**31 - 1),
    )
    for name, low, high in bounds:
        check_bounds(name, getattr(wire, name), low, high)


def _is_given(raw: msgspec.Raw) -> bool:
    return bytes(raw) not in (b"null", b"{}")


def _read_before(wire: _ResponsesBody, call: WireCall) -> list[Message]:
    before: list[Message] = []
    if wire.instructions:
        before.append({"role": "system", "content": wire.instructions})
    if wire.previous_response_id:
        found = wire.previous_response_id.removeprefix(ID_PREFIX)
        turns = call.turns_until(found)
        if not turns:
            raise PreviousResponseNotFound(wire.previous_response_id)
        said = [message for turn in turns for message in (*turn.messages_delta, turn.reply)]
        # The request's own instructions replace the previous ones.
        before += said[1:] if turns[-1].notes.instructions else said
    return before


def _read_choice(wire: _ResponsesBody, tools: ToolList) -> tuple[ToolMode, str | None]:
    choice = wire.tool_choice
    if not isinstance(choice, _ForcedTool):
        if choice == "required" and not tools.names:
            raise MalformedRequest("tool_choice: 'required' needs tools that can be offered", param="tool_choice")
        return ToolMode(choice or "auto"), None
    name = CallForm(choice.type, choice.name or choice.type, choice.namespace).function
    if choice.type not in CALL_KINDS or name not in tools.names:
        raise MalformedRequest(
            f"tool_choice: expected a tool that is offered; {name[:64]!r} is not, or only its vendor can run it",
            param="tool_choice",
        )
    return ToolMode.REQUIRED, name


def _read_schema(wanted: _TextFormat | None, tools: ToolList, limits: RequestLimits) -> str | None:
    if wanted is None or wanted.type == "text":
        return None
    if tools.names:
        raise MalformedRequest(
            f"text.format: expected no tools with type {wanted.type!r}, whose answers call none", param="text.format"
        )
    if wanted.type == "json_object":
        return '{"type":"object"}'
    if not _is_given(wanted.schema):
        raise MalformedRequest("text.format.schema: expected with type 'json_schema'", param="text.format.schema")
    schema = decode_schema(wanted.schema, limits, "text.format.schema", "text.format.schema")
    return msgspec.json.encode(schema).decode()


def _notes(wire: _ResponsesBody, ignored: Json, tools: ToolList) -> TurnNotes:
    return TurnNotes(
        instructions=bool(wire.instructions),
        call_forms=tools.forms,
        ignored=note_ignored(ignored),
        left_out=tuple(kind[:LONGEST_NOTE] for kind in tools.left_out[:MOST_NOTED]),
    )
