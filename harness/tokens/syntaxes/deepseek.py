"""Tool calls of DeepSeek V3.

<calls begin><call begin>function<sep>add
```json
{"a": 1}
```<call end><calls end>
"""

import re
from collections.abc import Sequence

from harness.tokens.parsing import CallSyntax, ParsedOutput, Piece, ToolCall, decode_json, read_calls, tool_call
from harness.types import Json


def _marker(words: str) -> str:
    bar, space = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
    return f"<{bar}{words.replace(' ', space)}{bar}>"


_CALLS_BEGIN, _CALLS_END = _marker("tool calls begin"), _marker("tool calls end")
_BEGIN, _END, _SEPARATOR = _marker("tool call begin"), _marker("tool call end"), _marker("tool sep")
_CALL = re.compile(rf"function{re.escape(_SEPARATOR)}([^\n]+)\n```json\n(.*)\n```", re.DOTALL)


class DeepSeek(CallSyntax):
    name = "deepseek-v3"
    markers = (_CALLS_BEGIN, _CALLS_END, _BEGIN, _END)

    def beginning(self, name: str | None) -> tuple[str, str]:
        begin = f"{_CALLS_BEGIN}{_BEGIN}function{_SEPARATOR}"
        return (begin, "") if name is None else (begin, f"{name}\n```json\n")

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        return read_calls(pieces, _BEGIN, _END, _read_call, around=(_CALLS_BEGIN, _CALLS_END))


def _read_call(block: str) -> ToolCall | None:
    call = _CALL.fullmatch(block)
    return None if call is None else tool_call(call.group(1), decode_json(call.group(2)))
