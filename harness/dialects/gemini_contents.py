"""Contents of Gemini as messages in normal form.

Consecutive contents of one side are one unit, since chats of the SDK keep a streamed reply chunk by chunk. A reply is
one message; of a user's unit each function response is a message, in order with the texts around it.

A call without an id gets one by its position. A response without an id belongs to a call by name and order.
"""

import json
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from harness.decoding import json_decoder
from harness.dialects.gemini_spelling import respell
from harness.dialects.ignored import NULL
from harness.dialects.json_values import check_json, decode_json
from harness.dialects.model_request import RecordedText, seal
from harness.errors import MalformedRequest
from harness.tokens.parsing import ToolCall
from harness.types import Json, Message

_SIDES = {"function": "user", "tool": "user"} | {role: role for role in ("model", "user", "system", "developer")}
"""Sides of a conversation, by role."""
_RESULTS = ("output", "result")
"""Names under which clients put a text that a function returned."""


class WireContent(msgspec.Struct, forbid_unknown_fields=True):
    role: str | None = None
    parts: list[msgspec.Raw] | None = None


class _GeminiCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    id: str | None = None
    args: msgspec.Raw = NULL


class _GeminiResponse(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    id: str | None = None
    response: dict[str, Any] | None = None


class _GeminiPart(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: _GeminiCall | None = None
    function_response: _GeminiResponse | None = None
    part_metadata: msgspec.Raw = NULL

    def __post_init__(self) -> None:
        if (self.text, self.function_call, self.function_response).count(None) < 2:
            raise ValueError("expected one of text, functionCall and functionResponse")


_Placed = tuple[str, _GeminiPart]
_part_decoder = json_decoder(_GeminiPart)


@dataclass(frozen=True, slots=True)
class ContentUnit:
    """Contents read as one."""

    side: str
    number: int
    """Index of its first content in the body; -1 for `systemInstruction`."""
    contents: list[Sequence[msgspec.Raw]]
    """Parts of each content."""
    replied: "ContentUnit | None" = None
    """Last unit of the model before it."""

    @property
    def raw(self) -> bytes:
        """Source of the unit, as JSON."""
        return msgspec.json.encode((self.side, *self.contents))

    def parts(self) -> Iterator[_Placed]:
        """Yield its parts with their fields in the body. Raises `MalformedRequest`."""
        for number, raws in enumerate(self.contents, start=self.number):
            content = "systemInstruction.parts" if self.number < 0 else f"contents[{number}].parts"
            for i, raw in enumerate(raws):
                place = f"{content}[{i}]"
                part = _decode_part(raw, place)
                kinds = (
                    ("functionCall", part.function_call, "model"),
                    ("functionResponse", part.function_response, "user"),
                )
                for kind, found, side in kinds:
                    if found is not None and side != self.side:
                        param = f"{place}.{kind}"
                        raise MalformedRequest(f"{param}: expected in contents of role {side!r} only", param=param)
                yield place, part


def units_of(system: WireContent | None, contents: Sequence[WireContent]) -> list[ContentUnit]:
    """Group the contents of a request into units, the system instruction first."""
    units = [] if system is None else [ContentUnit("system", -1, [system.parts or ()])]
    replied: ContentUnit | None = None
    for number, content in enumerate(contents):
        side = _SIDES.get(content.role or "user")
        if side is None:
            param = f"contents[{number}].role"
            raise MalformedRequest(f"{param}: expected user or model, got {content.role!r:.64}", param=param)
        if units and units[-1].side == side and units[-1].number >= 0:
            units[-1].contents.append(content.parts or ())
        else:
            units.append(ContentUnit(side, number, [content.parts or ()], replied))
            replied = units[-1] if side == "model" else replied
    return units


def sign(response_id: str) -> str:
    """Return the signature of a reply: its seal in base64, as which SDKs decode it."""
    return b64encode(seal(response_id).encode()).decode()


def read_unit(unit: ContentUnit, record: RecordedText) -> Sequence[Message]:
    """Return the unit's messages in normal form; none for a system instruction without text."""
    match unit.side:
        case "model":
            return [_read_reply(unit, record)]
        case "user":
            return _read_user(unit, record)
        case role:
            text = "".join(part.text or "" for _, part in unit.parts())
            return [{"role": role, "content": text}] if text else []


def _read_reply(unit: ContentUnit, record: RecordedText) -> Message:
    place, placed = f"contents[{unit.number}].parts", list(record.call.paced(unit.parts()))
    parts = [part for _, part in placed]
    message: Json = {"role": "assistant", "content": "".join(part.text or "" for part in parts if not part.thought)}
    calls = _find_calls(placed, unit.number)
    if len({call_id for _, _, call_id in calls}) < len(calls):
        raise MalformedRequest(f"{place}: expected a unique id for each call of the reply", param=place)
    if calls:
        message["tool_calls"] = []
    for where, call, call_id in calls:
        arguments = record.spell_arguments(call_id, call.args, f"{where}.functionCall.args")
        message["tool_calls"].append(ToolCall(call.name, arguments).to_json(call_id))
    seals: set[str] = set()
    thoughts = [part.text for part in parts if part.text and part.thought]
    thoughts = thoughts or [record.unseal(_unsign(part.thought_signature or ""), seals, place) for part in parts]
    return message | {"reasoning_content": "".join(thoughts)} if any(thoughts) else message


def _read_user(unit: ContentUnit, record: RecordedText) -> Sequence[Message]:
    messages: list[Message] = []
    text = ""
    unanswered: dict[str | None, OrderedDict[str, None]] = {}
    for _, made, made_id in _find_calls(unit.replied.parts(), unit.replied.number) if unit.replied else ():
        unanswered.setdefault(made.name, OrderedDict())[made_id] = None
    for place, part in record.call.paced(unit.parts()):
        text += part.text or ""
        if (response := part.function_response) is None:
            continue
        messages += [{"role": "user", "content": text}] if text else []
        text = ""
        check_json(response.response, place, record.limits.json_depth)
        call_id, calls = _our_id(response.id, response.name), unanswered.get(response.name)
        if calls and call_id:
            calls.pop(call_id, None)
        elif calls:
            call_id, _ = calls.popitem(last=False)
        result: Json = {"role": "tool", "content": _text_of(response.response)}
        messages.append(result | {"tool_call_id": call_id} if call_id else result)
    return [*messages, {"role": "user", "content": text}] if text or not messages else messages


def _find_calls(placed: Iterable[_Placed], number: int) -> list[tuple[str, _GeminiCall, str]]:
    calls = [(place, part.function_call) for place, part in placed if part.function_call is not None]
    ids = (_our_id(call.id, call.name) or f"call_{number}_{i}" for i, (_, call) in enumerate(calls))
    return [(place, call, call_id) for (place, call), call_id in zip(calls, ids, strict=True)]


def _our_id(sent: str | None, name: str | None) -> str:
    return (sent or "").removeprefix(f"{name}__")  # gemini-cli puts the name there


def _text_of(response: Json | None) -> str:
    match list((response or {}).items()):
        case []:
            return ""
        case [(name, str(text))] if name in _RESULTS:
            return text
        case _:
            return json.dumps(response, ensure_ascii=False)


def _decode_part(raw: msgspec.Raw, place: str) -> _GeminiPart:
    try:
        return decode_json(_part_decoder, respell(raw), place)
    except MalformedRequest as error:
        if "unknown field" not in error.message:
            raise
        expected = "expected text, functionCall or functionResponse: nothing else can be recorded"
        raise MalformedRequest(f"{error.message}; {expected}", param=error.param) from error


def _unsign(signature: str) -> str:
    try:
        return b64decode(signature, validate=True).decode("ascii")
    except (NotBase64, ValueError):
        return ""
