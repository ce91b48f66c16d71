"""Tool calls written as JSON without a marker behind them.

    Mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], to the end of the answer
    Mistral   [TOOL_CALLS]name[ARGS]{...}, once for each call, from version 11 on
    LlamaJson {"name": ..., "parameters": {...}}, which is the whole answer

Arguments may be called `parameters` in all of them.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence

from harness.tokens.parsing import (
    CallSyntax,
    ParsedOutput,
    Piece,
    ToolCall,
    as_malformed,
    decode_json,
    decode_json_at,
    tool_call,
    whole_calls,
)
from harness.types import Json

_CALLS = Piece("[TOOL_CALLS]", is_marker=True)
_CALL_ID, _ARGS = "[CALL_ID]", "[ARGS]"
_HEAD = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?\[ARGS\]\s*")
_PYTHON = "<|python_tag|>"
_TAG = Piece(_PYTHON, is_marker=True)
_NAMED = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"')


class Mistral(CallSyntax):
    """One list of calls after one marker, or names and arguments after a marker each."""

    name = "mistral"
    markers = (_CALLS.text, _CALL_ID, _ARGS)

    def beginning(self, name: str | None) -> tuple[str, str]:
        return _beginning(f"{_CALLS.text}[", name, "arguments")

    def may_begin_call(self, piece: Piece, before: str | None) -> bool:
        return piece == _CALLS

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        text = "".join(piece.text for piece in pieces)
        if _CALLS not in pieces:
            return ParsedOutput(text)
        begin = pieces.index(_CALLS)
        content = "".join(piece.text for piece in pieces[:begin])
        said = "".join(piece.text for piece in pieces[begin + 1 :])
        calls = decode_json(said) if said.lstrip().startswith("[") else [*_named_calls(said)]
        if not isinstance(calls, list) or not calls:
            return as_malformed(pieces)
        return whole_calls(pieces, content.rstrip(), [call_of(call, beside=("id",)) for call in calls])


class MistralNamed(Mistral):
    """Names and arguments after a marker each."""

    name = "mistral-named"

    def beginning(self, name: str | None) -> tuple[str, str]:
        return _CALLS.text, name or ""  # the second text is the agent's, in which `[ARGS]` would be no marker


class LlamaJson(CallSyntax):
    name = "llama3"
    markers = (_PYTHON,)

    def beginning(self, name: str | None) -> tuple[str, str]:
        return _beginning("", name, "parameters")

    def may_begin_call(self, piece: Piece, before: str | None) -> bool:
        return piece == _TAG or (before is not None and piece.text.lstrip().startswith("{"))

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        text = "".join(piece.text for piece in pieces)
        content, tag, said = text.partition(_PYTHON) if _TAG in pieces else ("", "", text)
        # Without a marker, an object that names no offered tool is content.
        offered = [tool["function"]["name"] for tool in tools]
        value, named = decode_json(said), _NAMED.match(said)
        begins_call = bool(tag) or (named is not None and named.group(1) in offered)
        call = call_of(value) if isinstance(value, dict) and value.get("name") in offered and len(value) > 1 else None
        return ParsedOutput(text, malformed=begins_call) if call is None else ParsedOutput(content.rstrip(), (call,))


def _named_calls(text: str) -> Iterator[object]:
    position = 0
    while position < len(text.rstrip()):
        head = _HEAD.match(text, position)
        arguments, position = (None, len(text)) if head is None else decode_json_at(text, head.end())
        # None, which is no call, ends the row.
        yield None if head is None else {"name": head.group(1), "arguments": arguments}


def _beginning(opening: str, name: str | None, arguments: str) -> tuple[str, str]:
    begin = opening + '{"name": "'
    return (begin, "") if name is None else (begin, f'{json.dumps(name, ensure_ascii=False)[1:]}, "{arguments}": ')


def call_of(call: object, beside: Collection[str] = (), *, name: str = "name") -> ToolCall | None:
    """Return the call that a JSON value says, or None. Fields `beside` its `name` and arguments get lost."""
    if not isinstance(call, dict):
        return None
    if call.get("type") == "function":
        beside = (*beside, "type")
    # An object with other fields is no call, because they would be lost.
    keys = call.keys() - {name, *beside}
    if len(keys) > 1 or not keys <= {"arguments", "parameters"}:
        return None
    return tool_call(call.get(name), call[min(keys)] if keys else {})
