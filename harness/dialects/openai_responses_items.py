"""Input items of OpenAI Responses as messages.

A model reply comes back as several items (reasoning, a message, calls); everything else is its own message. Items are
grouped by their heads alone, so that known items are not read again. A reference stands for the recorded item. A
request may reference each item once, so the record bounds the size of a body.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from harness.decoding import json_decoder
from harness.dialects.json_values import check_json, decode_json
from harness.dialects.model_request import RecordedText, said_arguments
from harness.dialects.openai_responses_tools import (
    CUSTOM,
    FUNCTION,
    LOCAL_SHELL,
    CallForm,
    custom_arguments,
    recorded_id,
    shell_arguments,
)
from harness.errors import MalformedRequest
from harness.tokens.parsing import ToolCall
from harness.types import Json, Message, Turn

_Role = Literal["user", "assistant", "system", "developer"]


class _ItemHead(msgspec.Struct):
    type: str | None = None
    role: str | None = None
    call_id: str | None = None
    id: str | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(msgspec.Struct):
    role: _Role
    content: str | list[_Part] | None = None


class _ReasoningItem(msgspec.Struct):
    summary: list[_Part] | None = None
    content: list[_Part] | None = None
    encrypted_content: str | None = None


class _FunctionCall(msgspec.Struct):
    name: str
    call_id: str
    arguments: str | None = None
    namespace: str | None = None


class _CustomCall(msgspec.Struct):
    name: str
    call_id: str
    input: str = ""
    namespace: str | None = None


class _ShellCall(msgspec.Struct):
    call_id: str
    action: dict[str, Any]


class _Result(msgspec.Struct):
    output: str | list[_Part] | None = None


_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_REFERENCE = "item_reference"
_TYPES = ("message", "reasoning", *_CALLS, *_RESULTS, _REFERENCE)
_ITEM_ID = re.compile(r"(rs|msg|fc|ctc|lsh)_([0-9a-f]+)(?:_(0|[1-9][0-9]{0,5}))?")
_ITEM_TYPES = {"rs": "reasoning", "msg": "message", **dict(zip(("fc", "ctc", "lsh"), _CALLS, strict=True))}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")

_head_decoder = json_decoder(_ItemHead)
_message_decoder = json_decoder(_Message)
_reasoning_decoder = json_decoder(_ReasoningItem)
_result_decoder = json_decoder(_Result)
_call_decoders: Mapping[str, msgspec.json.Decoder[Any]] = {
    "function_call": json_decoder(_FunctionCall),
    "custom_tool_call": json_decoder(_CustomCall),
    "local_shell_call": json_decoder(_ShellCall),
}


class Item(NamedTuple):
    """An input item whose head has been read."""

    raw: msgspec.Raw
    field: str
    type: str
    is_reply: bool
    """True if it is part of a model reply."""
    call_id: str
    """Id of the call that it is or answers."""
    recorded: Any = None
    """Text or call that a reference stands for; None for an item sent in full."""


class MessageItems(NamedTuple):
    """Items that form one message."""

    items: list[Item]
    types: set[str]

    @property
    def raw(self) -> msgspec.Raw:
        return msgspec.Raw(b",".join(item.raw for item in self.items))


def group_items(
    raws: Sequence[msgspec.Raw], asked_before: Sequence[Message], answered_as: Callable[[str], Turn | None]
) -> list[MessageItems]:
    """Group input items into messages that follow a known conversation. Raises `MalformedRequest`."""
    groups: list[MessageItems] = []
    calls = {call["id"] for message in asked_before for call in message.get("tool_calls") or ()}
    referred: set[str] = set()
    for i, raw in enumerate(raws):
        item = _read_head(raw, f"input[{i}]", answered_as, referred)
        _check_call_id(item, calls)
        if groups and item.is_reply and _belongs(item, groups[-1]):
            groups[-1].items.append(item)
            groups[-1].types.add(item.type)
        else:
            groups.append(MessageItems([item], {item.type}))
    return groups


def _read_head(raw: msgspec.Raw, field: str, answered_as: Callable[[str], Turn | None], referred: set[str]) -> Item:
    head = decode_json(_head_decoder, raw, field)
    kind = head.type or ("message" if head.role is not None else "" if head.id is None else _REFERENCE)
    if kind == _REFERENCE:
        return _refer(head.id or "", Item(raw, field, kind, True, ""), answered_as, referred)
    if kind not in _TYPES:
        raise MalformedRequest(
            f"{field}.type: expected one of {', '.join(_TYPES)}; {kind[:64]!r} cannot be recorded",
            param=f"{field}.type",
        )
    call_id = recorded_id(head.call_id or (head.id if kind == "local_shell_call_output" else None) or "")
    is_reply = kind == "reasoning" or kind in _CALLS or (kind == "message" and head.role == "assistant")
    return Item(raw, field, kind, is_reply, call_id)


def _refer(item_id: str, item: Item, answered_as: Callable[[str], Turn | None], referred: set[str]) -> Item:
    found = None if item_id in referred else _find_item(item_id, answered_as)
    if found is None:
        raise MalformedRequest(
            f"{item.field}.id: expected the id of an item that this session has answered with, each once;"
            f" got {item_id[:64]!r}; send the item itself",
            param=f"{item.field}.id",
        )
    referred.add(item_id)
    kind, recorded = found
    return item._replace(type=kind, recorded=recorded, call_id=recorded["id"] if kind in _CALLS else "")


def _find_item(item_id: str, answered_as: Callable[[str], Turn | None]) -> tuple[str, Any] | None:
    parts = _ITEM_ID.fullmatch(item_id)
    turn = None if parts is None else answered_as(parts[2])
    if parts is None or turn is None:
        return None
    kind, number, calls = _ITEM_TYPES[parts[1]], parts[3], turn.reply.get("tool_calls") or ()
    if kind in _CALLS:
        return (kind, calls[int(number)]) if number is not None and int(number) < len(calls) else None
    text = turn.reply.get("reasoning_content" if kind == "reasoning" else "content") or ""
    is_there = bool(text) or (kind == "message" and not calls)
    return (kind, text) if is_there and number is None else None


def _check_call_id(item: Item, calls: set[str]) -> None:
    if item.type not in _CALLS and item.type not in _RESULTS:
        return
    field = f"{item.field}.call_id"
    if not item.call_id:
        raise MalformedRequest(f"{field}: expected the id of a call, got none", param=field)
    if item.type in _CALLS:
        if item.call_id in calls:
            raise MalformedRequest(f"{field}: duplicate call id: {item.call_id[:64]!r}", param=field)
        calls.add(item.call_id)


def _belongs(item: Item, group: MessageItems) -> bool:
    """Return whether the item continues the reply: reasoning comes first, and there is one text."""
    if not group.items[0].is_reply:
        return False
    if item.type == "reasoning":
        return group.types == {"reasoning"}
    return item.type != "message" or "message" not in group.types


def read_message(group: MessageItems, record: RecordedText) -> Message:
    """Return the message in normal form. Raises `MalformedRequest`, `OverLimit`."""
    first = group.items[0]
    if first.type in _RESULTS:
        result = decode_json(_result_decoder, first.raw, first.field)
        content = read_text(result.output, f"{first.field}.output")
        return {"role": "tool", "content": content, "tool_call_id": first.call_id}
    if not first.is_reply:
        said = _decode_message(first)
        return {"role": said.role, "content": read_text(said.content, f"{first.field}.content")}
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Json] = []
    seals: set[str] = set()
    for item in record.call.paced(group.items):
        if item.type in _CALLS:
            calls.append(_read_call(item, record))
        elif item.recorded is not None:
            (texts if item.type == "message" else reasoning).append(record.take(item.recorded, item.field))
        elif item.type == "message":
            texts.append(read_text(_decode_message(item).content, f"{item.field}.content"))
        else:
            reasoning.append(_read_reasoning(item, record, seals))
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    return message


def read_text(content: str | Sequence[_Part] | None, field: str) -> str:
    """Return the text of a content. Raises `MalformedRequest` naming a part without text."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for i, part in enumerate(content or ()):
        text = part.text if part.type in _TEXTS else part.refusal if part.type == "refusal" else None
        if text is None:
            where = f"{field}[{i}]"
            raise MalformedRequest(
                f"{where}: expected a text, {part.type[:64]!r} cannot be recorded", param=f"{where}.type"
            )
        texts.append(text)
    return "".join(texts)


def _decode_message(item: Item) -> _Message:
    try:
        return decode_json(_message_decoder, item.raw, item.field)
    except MalformedRequest as error:
        if not (error.param or "").endswith(".role"):
            raise
        roles = ", ".join(get_args(_Role))
        raise MalformedRequest(f"{error.message}; expected one of {roles}", param=error.param) from error


def _read_call(item: Item, record: RecordedText) -> Json:
    if item.recorded is not None:
        record.take(item.recorded["function"]["arguments"], item.field)
        call: Json = item.recorded
        return call
    wire = decode_json(_call_decoders[item.type], item.raw, item.field)
    match wire:
        case _FunctionCall():
            form = CallForm(FUNCTION, wire.name, wire.namespace)
            arguments = said_arguments(wire.arguments)
        case _CustomCall():
            form = CallForm(CUSTOM, wire.name, wire.namespace)
            arguments = custom_arguments(wire.call_id, wire.input)
        case _:
            check_json(wire.action, f"{item.field}.action", record.limits.json_depth)
            form = CallForm(LOCAL_SHELL, LOCAL_SHELL)
            arguments = shell_arguments(wire.action)
    return ToolCall(form.function, arguments).to_json(item.call_id)


def _read_reasoning(item: Item, record: RecordedText, seals: set[str]) -> str:
    """Return the content's text, else the recorded reasoning of its seal, else its summary."""
    wire = decode_json(_reasoning_decoder, item.raw, item.field)
    content = read_text(wire.content, f"{item.field}.content")
    recorded = content or record.unseal(wire.encrypted_content or "", seals, item.field)
    return recorded or read_text(wire.summary, f"{item.field}.summary")
