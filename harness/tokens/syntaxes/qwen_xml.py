"""Qwen3-Coder's tool calls: tags with the function's name and its parameters, each value as plain text.

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

The schema of the tool says what a value is; one that does not fit its type stays text, and the tool may object.
"""

import re
from collections.abc import Mapping, Sequence

from harness.tokens.parsing import (
    CallSyntax,
    ParsedOutput,
    Piece,
    ToolCall,
    as_malformed,
    blocks_between,
    decode_json,
    tool_call,
    whole_calls,
)
from harness.types import Json

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER_BEGIN = re.compile(r"\s*<parameter=([^>\n]+)>")
_PARAMETER_END = "</parameter>"


class QwenXml(CallSyntax):
    """Tags inside `<tool_call>` and `</tool_call>`."""

    name = "qwen3-coder"
    markers = (_BEGIN, _END)

    def beginning(self, name: str | None) -> tuple[str, str]:
        """Up to the function's name, or up to its parameters."""
        begin = f"{_BEGIN}\n<function="
        return (begin, "") if name is None else (begin, f"{name}>\n")

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        """Calls, and what stands around them; without a call everything is content as it stands."""
        blocks = blocks_between(pieces, _BEGIN, _END)
        if blocks is None:
            return as_malformed(pieces)
        if not blocks.inside:
            return ParsedOutput(blocks.outside)
        schemas: dict[str, Json] = {}
        for tool in tools:
            properties = (tool["function"].get("parameters") or {}).get("properties")
            schemas[tool["function"]["name"]] = properties if isinstance(properties, dict) else {}
        return whole_calls(pieces, blocks.outside.strip(), [_call(block, schemas) for block in blocks.inside])


def _call(block: str, schemas: Mapping[str, Json]) -> ToolCall | None:
    function = _FUNCTION.fullmatch(block)
    if function is None:
        return None
    name = function.group(1)
    arguments = _arguments(function.group(2), schemas.get(name, {}))
    return None if arguments is None else tool_call(name, arguments)


def _arguments(text: str, properties: Json) -> Json | None:
    """The parameters in `text`; None when it is not a row of them, each name once."""
    arguments: Json = {}
    position = 0
    while (begin := _PARAMETER_BEGIN.match(text, position)) is not None:
        end = text.find(_PARAMETER_END, begin.end())
        name, value = begin.group(1), text[begin.end() : end]
        if end < 0 or name in arguments or "<parameter=" in value:
            return None
        arguments[name] = _convert(value.removeprefix("\n").removesuffix("\n"), properties.get(name))
        position = end + len(_PARAMETER_END)
    return None if text[position:].strip() else arguments


def _convert(value: str, schema: object) -> object:
    """`value` as its schema wants it."""
    kinds = schema.get("type", "string") if isinstance(schema, dict) else "string"
    if "string" in kinds:
        return value
    if "boolean" in kinds and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    decoded = decode_json(value)
    return value if decoded is None and value.strip() != "null" else decoded
