"""Tool calls of Qwen3-Coder, with each value as plain text.

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

The tool's schema decides what a value is (`argument_types`). A value that fits no type stays text.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial

from harness.tokens.parsing import CallSyntax, ParsedOutput, Piece, ToolCall, read_calls, tool_call
from harness.tokens.syntaxes.argument_types import ArgumentTypes
from harness.types import Json

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER_BEGIN = re.compile(r"\s*<parameter=([^>\n]+)>")
_PARAMETER_END = "</parameter>"
_VALUES = re.compile(rf"(<parameter=[^>\n]+>|{_PARAMETER_END})")


class QwenXml(CallSyntax):
    name = "qwen3-coder"
    markers = (_BEGIN, _END)

    def beginning(self, name: str | None) -> tuple[str, str]:
        begin = f"{_BEGIN}\n<function="
        return (begin, "") if name is None else (begin, f"{name}>\n")

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        types = {tool["function"]["name"]: ArgumentTypes(tool["function"].get("parameters") or {}) for tool in tools}
        read = partial(_read_call, types=types)
        return read_calls(pieces, _BEGIN, _END, read, count_quotes=lambda text: len(_VALUES.findall(text)))


def _read_call(block: str, types: Mapping[str, ArgumentTypes]) -> ToolCall | None:
    function = _FUNCTION.fullmatch(block)
    if function is None:
        return None
    name, text = function.groups()
    of_tool = types.get(name) or ArgumentTypes({})
    arguments: Json = {}
    position = 0
    while (begin := _PARAMETER_BEGIN.match(text, position)) is not None:
        end = text.find(_PARAMETER_END, begin.end())
        parameter, value = begin.group(1), text[begin.end() : end]
        if end < 0 or parameter in arguments or "<parameter=" in value:
            return None
        arguments[parameter] = of_tool.read(parameter, value.removeprefix("\n").removesuffix("\n"))
        position = end + len(_PARAMETER_END)
    return None if text[position:].strip() else tool_call(name, arguments)
