"""Tool calls that are written as JSON, with or without markers around them.

    Hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen, SmolLM and many others write them
    Mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], to the end of the answer
    LlamaJson {"name": ..., "parameters": {...}}, which is the whole answer

The last has no marker, so an object that names no tool on offer is content.
"""

import json
from collections.abc import Sequence

from harness.tokens.parsing import (
    CallSyntax,
    ParsedOutput,
    Piece,
    ToolCall,
    as_malformed,
    decode_json,
    read_calls,
    tool_call,
    whole_calls,
)
from harness.types import Json

_BEGIN, _END = "<tool_call>", "</tool_call>"
_CALLS = Piece("[TOOL_CALLS]", is_marker=True)
_PYTHON = "<|python_tag|>"


class Hermes(CallSyntax):
    """Between two markers, an object with `name` and `arguments` per call."""

    name = "hermes"
    markers = (_BEGIN, _END)

    def beginning(self, name: str | None) -> tuple[str, str]:
        """Up to the tool's name, or up to its arguments."""
        return _beginning(f"{_BEGIN}\n", name, "arguments")

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        """Calls, and what stands around them; without a call everything is content as it stands."""
        del tools
        return read_calls(pieces, _BEGIN, _END, lambda block: _call(decode_json(block)))


class Mistral(CallSyntax):
    """One list of calls after one marker."""

    name = "mistral"
    markers = (_CALLS.text,)

    def beginning(self, name: str | None) -> tuple[str, str]:
        """Up to the tool's name, or up to its arguments."""
        return _beginning(f"{_CALLS.text}[", name, "arguments")

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        """Calls, and what stands before them; without a call everything is content as it stands."""
        del tools
        text = "".join(piece.text for piece in pieces)
        if _CALLS not in pieces:
            return ParsedOutput(text)
        begin = pieces.index(_CALLS)
        calls = decode_json("".join(piece.text for piece in pieces[begin + 1 :]))
        if not isinstance(calls, list) or not calls:
            return as_malformed(pieces)
        content = "".join(piece.text for piece in pieces[:begin])
        return whole_calls(pieces, content.rstrip(), [_call(call) for call in calls])


class LlamaJson(CallSyntax):
    """One call, which is the whole answer."""

    name = "llama3"
    markers = (_PYTHON,)

    def beginning(self, name: str | None) -> tuple[str, str]:
        """Up to the tool's name, or up to its arguments."""
        return _beginning("", name, "parameters")

    def may_begin_call(self, piece: Piece, before: str | None) -> bool:
        """At the beginning of the answer: an object, or the marker."""
        return before is not None and (piece == Piece(_PYTHON, is_marker=True) or piece.text.lstrip().startswith("{"))

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        """The call that the answer is, or the answer as content."""
        text = "".join(piece.text for piece in pieces)
        said = decode_json(text.removeprefix(_PYTHON))
        if not isinstance(said, dict) or said.keys() != {"name", "parameters"}:
            return ParsedOutput(text)
        if said["name"] not in [tool["function"]["name"] for tool in tools]:
            return ParsedOutput(text)
        call = tool_call(said["name"], said["parameters"])
        return ParsedOutput(text, malformed=True) if call is None else ParsedOutput("", (call,))


def _beginning(opening: str, name: str | None, arguments: str) -> tuple[str, str]:
    """An object behind `opening`, up to the tool's name, or up to the value of its field `arguments`."""
    begin = opening + '{"name": "'
    return (begin, "") if name is None else (begin, f'{json.dumps(name, ensure_ascii=False)[1:]}, "{arguments}": ')


def _call(call: object) -> ToolCall | None:
    return tool_call(call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else None
