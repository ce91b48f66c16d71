"""Hermes tool calls, as Qwen, SmolLM and many others write them: JSON between `<tool_call>` and `</tool_call>`."""

import json
from collections.abc import Sequence

from harness.tokens.parsing import CallSyntax, ParsedOutput, ToolCall, decode_json, malformed, tool_call, whole_calls
from harness.tokens.pieces import Piece, blocks_between
from harness.types import Json

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes(CallSyntax):
    """An object with `name` and `arguments` per call."""

    name = "hermes"
    markers = (_BEGIN, _END)

    def beginning(self, name: str | None) -> tuple[str, str]:
        """Up to the tool's name, or up to its arguments."""
        begin = f'{_BEGIN}\n{{"name": "'
        return (begin, "") if name is None else (begin, json.dumps(name, ensure_ascii=False)[1:] + ', "arguments": ')

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        """Calls, and what stands around them; without a call everything is content as it stands."""
        del tools
        blocks = blocks_between(pieces, _BEGIN, _END)
        if blocks is None:
            return malformed(pieces)
        if not blocks.inside:
            return ParsedOutput(blocks.outside)
        return whole_calls(pieces, blocks.outside.strip(), [_call(block) for block in blocks.inside])


def _call(block: str) -> ToolCall | None:
    call = decode_json(block)
    return tool_call(call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else None
