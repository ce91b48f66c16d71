"""Tool calls between two markers, a row for each family. A block holds one of three things:

    JSON     <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or a list of such objects
    headed   <call begin>function<sep>add ... {...}<call end>, a name before its JSON
    tagged   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>, each value as plain text

The tool's schema decides what a plain text is (`argument_types`). One that fits no type stays text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from harness.tokens.parsing import CallSyntax, ParsedOutput, Piece, ToolCall, decode_json, read_calls, tool_call
from harness.tokens.syntaxes.argument_types import ArgumentTypes
from harness.tokens.syntaxes.json_calls import call_of
from harness.types import Json

Types = Mapping[str, ArgumentTypes]
Reader = Callable[[Types, str], Sequence[ToolCall | None]]
_SPACE = re.compile(r"\s*")
_ESCAPES = re.compile(r"\\.", re.DOTALL)
_Q = '<|"|>'
_KEY = re.compile(r"([{,]\s*)([^\s{}\[\]:,]+)(?=\s*:)")
_NONE = re.compile(r"(?<=[:,\[])\s*None(?=\s*[,}\]])")


def _count_quotes(text: str) -> int:
    return (_ESCAPES.sub("", text) if "\\" in text else text).count('"')


@dataclass(frozen=True)
class MarkedCalls(CallSyntax):
    name: str
    begin: str
    end: str
    call: str
    """Text between `begin` and the name of a required call, which is a JSON string behind a quote."""
    arguments: str
    """Text between that name and the arguments."""
    read: Reader
    """Reader of a block. Nothing, or None, is no call."""
    count_quotes: Callable[[str], int] = _count_quotes
    around: tuple[str, ...] = ()
    """Markers around the blocks, which are no content."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.around, self.begin, self.end)

    def beginning(self, name: str | None) -> tuple[str, str]:
        opening = f"{''.join(self.around[:1])}{self.begin}{self.call}"
        said = json.dumps(name, ensure_ascii=False)[1:-1] if self.call.endswith('"') else name
        return (opening, "") if name is None else (opening, f"{said}{self.arguments}")

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        types = {tool["function"]["name"]: ArgumentTypes(tool["function"].get("parameters") or {}) for tool in tools}
        read = partial(self.read, types)
        return read_calls(pieces, self.begin, self.end, read, around=self.around, count_quotes=self.count_quotes)


def _read_json(_: Types, block: str, read: Callable[[object], ToolCall | None] = call_of) -> list[ToolCall | None]:
    value = decode_json(block)
    if value is None:
        value = [decode_json(line) for line in block.strip().split("\n")]  # MiniMax-M1: a call a line
    return [read(each) for each in (value if isinstance(value, list) else [value])]


def _read_pair(value: object) -> ToolCall | None:
    pairs = [*value.items()] if isinstance(value, dict) else []
    return tool_call(*pairs[0]) if len(pairs) == 1 else None


def _headed(pattern: str, decode: Callable[[str], object] = decode_json) -> Reader:
    compiled = re.compile(pattern, re.DOTALL)

    def read(_: Types, block: str) -> list[ToolCall | None]:
        found = compiled.fullmatch(block)
        return [] if found is None else [tool_call(found.group(1), decode(found.group(2)))]

    return read


def _decode_gemma(text: str) -> object:
    """Return the value of `text` whose keys have no quotes and whose strings stand between markers."""
    outside = text.split(_Q)[::2]
    inside = [json.dumps(each, ensure_ascii=False) for each in text.split(_Q)[1::2]]
    plain = [_KEY.sub(r'\1"\2"', _NONE.sub("null", each)) for each in outside]
    return decode_json("".join(part for pair in zip(plain, [*inside, ""], strict=False) for part in pair))


@dataclass(frozen=True)
class _Tags:
    call: str
    """Pattern of the beginning of a call, with its name."""
    value: str
    """Pattern of the beginning of a value, with its name, and maybe `true` for text or `false` for JSON."""
    value_end: str
    call_end: str
    padding: str = ""
    """White space around a value, once on each side."""

    def count(self, text: str) -> int:
        return sum(1 for _ in re.finditer(self.value, text)) + text.count(self.value_end)

    def read(self, types: Types, block: str) -> list[ToolCall | None]:
        call, value = re.compile(self.call), re.compile(self.value)
        calls: list[ToolCall | None] = []
        block, position = block.strip(), 0
        while position < len(block):
            if (called := call.match(block, position)) is None:
                return []
            of_tool = types.get(called.group(1)) or ArgumentTypes({})
            arguments: Json = {}
            position = _skip(block, called.end())
            while (begin := value.match(block, position)) is not None:
                end = block.find(self.value_end, begin.end())
                name, text = begin.group(1).strip(), block[begin.end() : end]
                if end < 0 or name in arguments or value.search(text):
                    return []
                text = text.removeprefix(self.padding).removesuffix(self.padding)
                kind = begin.groups()[1:]
                is_json = kind == ("false",) and (text.strip() == "null" or decode_json(text) is not None)
                typed = decode_json(text) if is_json else of_tool.read(name, text)
                arguments[name] = text if kind == ("true",) else typed
                position = _skip(block, end + len(self.value_end))
            if not block.startswith(self.call_end, position):
                return []
            calls.append(tool_call(called.group(1), arguments))
            position = _skip(block, position + len(self.call_end))
        return calls


def _skip(text: str, position: int) -> int:
    return found.end() if (found := _SPACE.match(text, position)) else position


def _deepseek(words: str) -> str:
    bar, space = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
    return f"<{bar}{words.replace(' ', space)}{bar}>"


def _invoking(name: str, block: str, tag: str = "", text: str = "") -> MarkedCalls:
    tags = _Tags(
        rf"<{tag}invoke name=[\"']?([^\"'>\n]+)[\"']?>",
        rf"<{tag}parameter name=[\"']?([^\"'>\n]+)[\"']?{text}>",
        f"</{tag}parameter>",
        f"</{tag}invoke>",
    )
    begin, end = f"<{block}>", f"</{block}>"
    return MarkedCalls(name, begin, end, f'\n<{tag}invoke name="', '">\n', tags.read, tags.count)


_SEPARATOR = _deepseek("tool sep")
_CALLS, _CALL = ((_deepseek(f"{words} begin"), _deepseek(f"{words} end")) for words in ("tool calls", "tool call"))
_DSML = "\N{FULLWIDTH VERTICAL LINE}DSML\N{FULLWIDTH VERTICAL LINE}"
_NAME, _ARGUMENTS = '{"name": "', '", "arguments": '
_COHERE = ("<|START_ACTION|>", "<|END_ACTION|>", '[\n    {"tool_call_id": "0", "tool_name": "', '", "parameters": ')
_KIMI = ("<|tool_call_begin|>", "<|tool_call_end|>", "functions.", ":0<|tool_call_argument_begin|>")
_KIMI_CALLS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_READ_LIST = partial(_read_json, read=partial(call_of, beside=("id",)))
_READ_COHERE = partial(_read_json, read=partial(call_of, beside=("tool_call_id",), name="tool_name"))
_READ_PAIRS = partial(_read_json, read=_read_pair)
_READ_FENCED = _headed(rf"function{_SEPARATOR}([^\n]+)\n```json\n(.*)\n```")
_READ_PLAIN = _headed(rf"([^\n]+?){_SEPARATOR}(.*)")
_READ_KIMI = _headed(r"\s*functions\.(\S+?):\d+\s*<\|tool_call_argument_begin\|>(.*)")
_READ_GEMMA = _headed(r"call:([^\s{]+)(\{.*\})", _decode_gemma)
_XML = _Tags(r"<function=([^>\n]+)>", r"<parameter=([^>\n]+)>", "</parameter>", "</function>", padding="\n")
_PAIRS = _Tags(r"\A([^\s<{]+)", r"<arg_key>([^<]+)</arg_key>\s*<arg_value>", "</arg_value>", "")
HERMES = MarkedCalls("hermes", "<tool_call>", "</tool_call>", f"\n{_NAME}", _ARGUMENTS, _read_json)
LISTED = MarkedCalls("listed", "<tool_calls>", "</tool_calls>", f"[{_NAME}", _ARGUMENTS, _READ_LIST)
NEMOTRON = replace(LISTED, name="nemotron", begin="<TOOLCALL>", end="</TOOLCALL>")
COHERE = MarkedCalls("cohere", *_COHERE, _READ_COHERE)
APERTUS = MarkedCalls("apertus", "<|tools_prefix|>", "<|tools_suffix|>", '[{"', '": ', _READ_PAIRS)
DEEPSEEK = MarkedCalls("deepseek-v3", *_CALL, f"function{_SEPARATOR}", "\n```json\n", _READ_FENCED, around=_CALLS)
DEEPSEEK_3_1 = replace(DEEPSEEK, name="deepseek-v3.1", call="", arguments=_SEPARATOR, read=_READ_PLAIN)
KIMI = MarkedCalls("kimi-k2", *_KIMI, _READ_KIMI, around=_KIMI_CALLS)
GEMMA = MarkedCalls("gemma4", "<|tool_call>", "<tool_call|>", "call:", "{", _READ_GEMMA, lambda text: text.count(_Q))
QWEN = MarkedCalls("qwen3-coder", "<tool_call>", "</tool_call>", "\n<function=", ">\n", _XML.read, _XML.count)
SEED = replace(QWEN, name="seed", begin="<seed:tool_call>", end="</seed:tool_call>")
GLM = replace(QWEN, name="glm", call="", arguments="\n", read=_PAIRS.read, count_quotes=_PAIRS.count)
MINIMAX = _invoking("minimax-m2", "minimax:tool_call")
DSML_CALLS = _invoking("deepseek-dsml", f"{_DSML}function_calls", _DSML, ' string="(true|false)"')
DSML_TOOLS = _invoking("deepseek-dsml", f"{_DSML}tool_calls", _DSML, ' string="(true|false)"')

MARKED: Mapping[tuple[str, ...], MarkedCalls] = {
    **{(each.begin,): each for each in (SEED, MINIMAX, DSML_CALLS, DSML_TOOLS, APERTUS, COHERE, GEMMA, NEMOTRON, KIMI)},
    ("<tool_call>", "<arg_key>"): GLM,
    ("<function=", "<parameter="): QWEN,
    ("<tool_call>",): HERMES,
    (DEEPSEEK.begin, "```json"): DEEPSEEK,
    (DEEPSEEK.begin,): DEEPSEEK_3_1,
    (LISTED.begin,): LISTED,
}
"""Syntaxes by the texts that reveal them. The first row that fits decides."""
