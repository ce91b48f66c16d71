"""Blocks of Anthropic Messages as messages in normal form.

A message of blocks becomes several: each tool result is its own message, in order with the texts around it. Consecutive
replies become one. The record undoes a client's changes to a reply: arguments sent as an object get their sampled
spelling back by call id, dropped reasoning comes back by its signature.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from harness.decoding import json_decoder
from harness.dialects.json_values import decode_json
from harness.dialects.model_request import RecordedText
from harness.errors import MalformedRequest
from harness.tokens.parsing import ToolCall
from harness.types import Json, Message

_T = TypeVar("_T")

_BETWEEN_BLOCKS = "\n"
_MOST_ALIASES = 16
_LONGEST_ALIAS = 64  # characters


class _BodyPart(msgspec.Struct, gc=False):  # without cycles
    def __post_init__(self) -> None:
        """Let other threads run: otherwise a decoder holds the interpreter until it is done."""


class WireMessage(_BodyPart):
    role: str
    content: msgspec.Raw


class _TextBlock(_BodyPart, tag="text"):
    text: str


class _Thinking(_BodyPart, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class _RedactedThinking(_BodyPart, tag="redacted_thinking"):
    data: str = ""


class _ToolUse(_BodyPart, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw = msgspec.Raw(b"{}")


class _ToolReference(_BodyPart, tag="tool_reference"):
    tool_name: str


class _ToolResult(_BodyPart, tag="tool_result"):
    tool_use_id: str
    content: str | list[_TextBlock | _ToolReference] | None = None
    is_error: bool | None = False


_Block = _TextBlock | _Thinking | _RedactedThinking | _ToolUse | _ToolResult

_content_decoder = json_decoder(str | list[_Block] | None)
_system_decoder = json_decoder(str | list[_TextBlock] | None)


class Unit(NamedTuple):
    """Messages read as one: a system prompt, a message, or consecutive replies."""

    role: str
    number: int
    """Index of its first message in the body; -1 for the field `system`."""
    contents: list[msgspec.Raw]

    @property
    def raw(self) -> bytes:
        """Source of the unit, as JSON."""
        return b",".join((msgspec.json.encode(self.role), *self.contents))

    @property
    def places(self) -> Sequence[str]:
        """Fields of its contents in the body."""
        if self.number < 0:
            return ["system"]
        return [f"messages[{self.number + i}].content" for i in range(len(self.contents))]


def units_of(system: msgspec.Raw, messages: Iterable[WireMessage]) -> list[Unit]:
    """Group a request's messages into units, `system` first."""
    units = [] if bytes(system) == b"null" else [Unit("system", -1, [system])]
    for number, said in enumerate(messages):
        if said.role == "assistant" and units and units[-1].role == "assistant":
            units[-1].contents.append(said.content)
        else:
            units.append(Unit(said.role, number, [said.content]))
    return units


@dataclass(slots=True)
class BlockReader:
    """Reader of units that collects tool references and role aliases."""

    record: RecordedText
    references: set[str] = field(default_factory=set)
    """Tools that results refer to."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Unknown roles, read as `user`, by field."""

    def read(self, unit: Unit) -> Sequence[Message]:
        """Return the unit's messages in normal form; none for a system prompt without text."""
        place = unit.places[0]
        if unit.role in ("system", "developer"):
            text = _join(_decode(_system_decoder, unit.contents[0], place, "text") or "")
            return [{"role": unit.role, "content": text}] if text else []
        placed = zip(unit.places, unit.contents, strict=True)
        blocks = [block for place, content in placed for block in _read_blocks(content, place)]
        if unit.role == "assistant":
            return [self._read_reply(blocks, place)]
        if unit.role != "user" and len(self.aliases) < _MOST_ALIASES:
            self.aliases[place.replace("content", "role")] = unit.role[:_LONGEST_ALIAS]
        return self._read_user(blocks, place)

    def _read_reply(self, blocks: Sequence[_Block], place: str) -> Message:
        texts: list[str] = []
        reasoning: list[str] = []
        redacted: list[str] = []
        calls: list[Json] = []
        ids: set[str] = set()
        seals: set[str] = set()
        for block in self.record.call.paced(blocks):
            match block:
                case _TextBlock(text):
                    texts.append(text)
                case _Thinking(thinking, signature):
                    reasoning.append(thinking or self.record.unseal(signature, seals, place))
                case _RedactedThinking(data):
                    redacted.append(data)
                case _ToolUse():
                    if block.id and block.id in ids:
                        raise MalformedRequest(f"{place}: expected a unique id for each call", param=place)
                    ids.add(block.id)
                    arguments = self.record.spell_arguments(block.id, block.input, f"{place}.input")
                    calls.append(ToolCall(block.name, arguments).to_json(block.id))
                case _:
                    raise _misplaced(place, "tool_result", "user")
        message: Json = {"role": "assistant", "content": "".join(texts)}
        if calls:
            message["tool_calls"] = calls
        if any(reasoning):
            message["reasoning_content"] = "".join(reasoning)
        if redacted:
            message["redacted_thinking"] = redacted
        return message

    def _read_user(self, blocks: Sequence[_Block], place: str) -> Sequence[Message]:
        messages: list[Message] = []
        texts: list[_TextBlock] = []
        for block in self.record.call.paced(blocks):
            match block:
                case _TextBlock():
                    texts.append(block)
                case _ToolResult():
                    if texts:
                        messages.append({"role": "user", "content": _join(texts)})
                        texts = []
                    messages.append(self._read_result(block))
                case _:
                    raise _misplaced(place, block.__struct_config__.tag, "assistant")
        if texts or not messages:
            messages.append({"role": "user", "content": _join(texts)})
        return messages

    def _read_result(self, result: _ToolResult) -> Message:
        content = result.content or ""
        if not isinstance(content, str):
            self.references.update(part.tool_name for part in content if isinstance(part, _ToolReference))
        message: Json = {"role": "tool", "content": _join(content), "tool_call_id": result.tool_use_id}
        return message | {"is_error": True} if result.is_error else message


def _read_blocks(content: msgspec.Raw, place: str) -> Sequence[_Block]:
    blocks = _decode(_content_decoder, content, place, "text, thinking, redacted_thinking, tool_use or tool_result")
    return [_TextBlock(blocks)] if isinstance(blocks, str) else blocks or ()


def _decode(decoder: msgspec.json.Decoder[_T], content: msgspec.Raw, place: str, kinds: str) -> _T:
    try:
        return decode_json(decoder, content, place)
    except MalformedRequest as error:
        if not (error.param or "").endswith(".type"):
            raise
        raise MalformedRequest(
            f"{error.message}; expected {kinds}, within a result text or tool_reference: nothing else can be recorded",
            param=error.param,
        ) from error


def _join(content: str | Sequence[_TextBlock | _ToolReference]) -> str:
    if isinstance(content, str):
        return content
    parts = (part.text if isinstance(part, _TextBlock) else f"Tool available: {part.tool_name}" for part in content)
    return _BETWEEN_BLOCKS.join(parts)


def _misplaced(place: str, kind: object, role: str) -> MalformedRequest:
    return MalformedRequest(f"{place}: a {kind} block is for messages of role {role!r}", param=place)
