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
    decode_json,
    read_calls,
    tool_call,
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
        schemas: dict[str, Json] = {}
        for tool in tools:
            properties = (tool["function"].get("parameters") or {}).get("properties")
            schemas[tool["function"]["name"]] = properties if isinstance(properties, dict) else {}
        return read_calls(pieces, _BEGIN, _END, lambda block: _read_call(block, schemas))


def _read_call(block: str, schemas: Mapping[str, Json]) -> ToolCall | None:
    """The call in `block`; None when it is not a function with a row of parameters, each name once."""
    function = _FUNCTION.fullmatch(block)
    if function is None:
        return None
    name, text = function.groups()
    properties = schemas.get(name, {})
    arguments: Json = {}
    position = 0
    while (begin := _PARAMETER_BEGIN.match(text, position)) is not None:
        end = text.find(_PARAMETER_END, begin.end())
        parameter, value = begin.group(1), text[begin.end() : end]
        if end < 0 or parameter in arguments or "<parameter=" in value:
            return None
        arguments[parameter] = _convert(value.removeprefix("\n").removesuffix("\n"), properties.get(parameter))
        position = end + len(_PARAMETER_END)
    return None if text[position:].strip() else tool_call(name, arguments)


def _convert(value: str, schema: object) -> object:
    """`value` as its schema wants it."""
    kinds = schema.get("type", "string") if isinstance(schema, dict) else "string"
    if "string" in kinds:
        return value
    if "boolean" in kinds and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    decoded = decode_json(value)
    return value if decoded is None and value.strip() != "null" else decoded
