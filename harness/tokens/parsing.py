"""Sampled ids to an assistant message: content and tool calls.

A tool call is a JSON object with `name` and `arguments` between `<tool_call>` and `</tool_call>` (Hermes). Whatever
the model wrote, parsing returns: an output whose calls are malformed, cut off or nested becomes content as it stands,
and `malformed` says so. Ids are never changed here; this is only what the agent gets to read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from harness.tokens.tokenizer import Tokenizer

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


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


def call_beginning(name: str | None) -> tuple[str, str]:
    """How an answer that must be a call (of `name`) begins: our words, and those with the tool's name."""
    begin = f'{_OPEN}\n{{"name": "'
    return (begin, "") if name is None else (begin, json.dumps(name, ensure_ascii=False)[1:] + ', "arguments": ')


def parse_output(text: str, *, with_tools: bool = True) -> ParsedOutput:
    """Content and tool calls of `text`; without tools on offer everything is content."""
    if not with_tools:
        return ParsedOutput(text)
    blocks, outside = _split(text)
    if _OPEN in outside or _CLOSE in outside:
        return ParsedOutput(text, malformed=True)
    if not blocks:
        return ParsedOutput(text)
    calls = [_parse_call(block) for block in blocks]
    whole = [call for call in calls if call is not None]
    if len(whole) < len(calls):
        return ParsedOutput(text, malformed=True)
    return ParsedOutput(outside.strip(), tuple(whole))


def _split(text: str) -> tuple[list[str], str]:
    """What stands between markers, and everything else; one pass, however often a model repeats a marker."""
    blocks: list[str] = []
    outside: list[str] = []
    position = 0
    while (begin := text.find(_OPEN, position)) >= 0:
        end = text.find(_CLOSE, begin + len(_OPEN))
        if end < 0:
            break
        outside.append(text[position:begin])
        blocks.append(text[begin + len(_OPEN) : end])
        position = end + len(_CLOSE)
    return blocks, "".join([*outside, text[position:]])


def _parse_call(block: str) -> ToolCall | None:
    try:
        call = json.loads(block, parse_constant=_refuse_constant)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict) or not call["name"]:
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (call["name"] + text).encode()  # half a surrogate pair, written as an escape, is no text
    except (ValueError, RecursionError):
        return None
    return ToolCall(call["name"], text)


def _refuse_constant(name: str) -> None:
    """NaN and Infinity are not JSON; an agent's parser would fail on them."""
    raise ValueError(name)
