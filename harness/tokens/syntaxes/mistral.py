"""Mistral's tool calls: `[TOOL_CALLS]` and a JSON list of objects with `name` and `arguments`, to the end."""

import json
from collections.abc import Sequence

from harness.tokens.parsing import CallSyntax, ParsedOutput, ToolCall, decode_json, malformed, tool_call, whole_calls
from harness.tokens.pieces import Piece
from harness.types import Json

_BEGIN = Piece("[TOOL_CALLS]", is_marker=True)


class Mistral(CallSyntax):
    """One list of calls after one marker."""

    name = "mistral"
    markers = (_BEGIN.text,)

    def beginning(self, name: str | None) -> tuple[str, str]:
        """Up to the tool's name, or up to its arguments."""
        begin = _BEGIN.text + '[{"name": "'
        return (begin, "") if name is None else (begin, json.dumps(name, ensure_ascii=False)[1:] + ', "arguments": ')

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        """Calls, and what stands before them; without a call everything is content as it stands."""
        del tools
        text = "".join(piece.text for piece in pieces)
        if _BEGIN not in pieces:
            return ParsedOutput(text)
        begin = pieces.index(_BEGIN)
        calls = decode_json("".join(piece.text for piece in pieces[begin + 1 :]))
        if not isinstance(calls, list) or not calls:
            return malformed(pieces)
        content = "".join(piece.text for piece in pieces[:begin])
        return whole_calls(pieces, content.strip(), [_call(call) for call in calls])


def _call(call: object) -> ToolCall | None:
    return tool_call(call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else None
