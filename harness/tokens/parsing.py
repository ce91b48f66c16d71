"""Sampled ids to an assistant message: content and tool calls.

A tool call is a JSON object with `name` and `arguments` between `<tool_call>` and `</tool_call>` (Hermes). Whatever
the model wrote, parsing returns: an output whose calls are malformed, cut off or nested becomes content as it stands,
and `malformed` says so. Ids are never changed here; this is only what the agent gets to read.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.tokens.tokenizer import Tokenizer

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(rf"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: `arguments` is the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """What an agent reads of an output."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: bool = False
    """A tool call was begun that is not one; it is part of `content`."""


def output_text(tokenizer: Tokenizer, output_ids: Sequence[int], stop: str | None = None) -> str:
    """Text of an output without the id that ended it and without the stop string and what follows it."""
    ids = list(output_ids)
    if ids and ids[-1] in tokenizer.eos_ids:
        ids.pop()
    text = tokenizer.decode(ids)
    return text[: text.index(stop)] if stop and stop in text else text


def parse_output(text: str, *, with_tools: bool = True) -> ParsedOutput:
    """Content and tool calls of `text`; without tools on offer everything is content."""
    if not with_tools:
        return ParsedOutput(text)
    outside = _BLOCK.sub("", text)
    if _OPEN in outside or _CLOSE in outside:
        return ParsedOutput(text, malformed=True)
    calls = [_parse_call(block) for block in _BLOCK.findall(text)]
    if not calls:
        return ParsedOutput(text)
    whole = [call for call in calls if call is not None]
    if len(whole) < len(calls):
        return ParsedOutput(text, malformed=True)
    return ParsedOutput(outside.strip(), tuple(whole))


def _parse_call(block: str) -> ToolCall | None:
    try:
        call = json.loads(block, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict) or not call["name"]:
        return None
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))


def _refuse_constant(name: str) -> None:
    """NaN and Infinity are not JSON; an agent's parser would fail on them."""
    raise ValueError(name)
