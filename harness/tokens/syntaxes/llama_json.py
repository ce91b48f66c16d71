"""Llama 3's tool calls: the whole answer is one JSON object with `name` and `parameters`, nothing around it.

There is no marker, so an object that names no tool on offer is content.
"""

import json
from collections.abc import Sequence

from harness.tokens.parsing import CallSyntax, ParsedOutput, decode_json, tool_call
from harness.tokens.pieces import Piece
from harness.types import Json

_PYTHON = "<|python_tag|>"
_KEYS = {"name", "parameters"}


class LlamaJson(CallSyntax):
    """One call per answer."""

    name = "llama3"
    markers = (_PYTHON,)

    def beginning(self, name: str | None) -> tuple[str, str]:
        """Up to the tool's name, or up to its arguments."""
        begin = '{"name": "'
        return (begin, "") if name is None else (begin, json.dumps(name, ensure_ascii=False)[1:] + ', "parameters": ')

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        """The call that the answer is, or the answer as content."""
        text = "".join(piece.text for piece in pieces)
        said = decode_json(text.removeprefix(_PYTHON))
        if not isinstance(said, dict) or said.keys() != _KEYS:
            return ParsedOutput(text)
        if said["name"] not in [tool["function"]["name"] for tool in tools]:
            return ParsedOutput(text)
        call = tool_call(said["name"], said["parameters"])
        return ParsedOutput(text, malformed=True) if call is None else ParsedOutput("", (call,))
