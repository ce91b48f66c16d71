"""From sampled ids to the parts of an output: pieces between markers, content, reasoning and tool calls.

A marker that is one id of the vocabulary is recognized by that id and nothing else: the same characters spelled out
with other ids, copied from a message say, are text. Markers that the vocabulary lacks are found in the text.

Parsing returns whatever the model wrote: an output whose calls are malformed, cut off or nested becomes content as it
stands, and `malformed` says so. Nothing is repaired. Ids are never changed here.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, refuse_constant


class Piece(NamedTuple):
    """A marker, or the text between two."""

    text: str
    is_marker: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: `arguments` is the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """The parts of an output that an agent reads."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: bool = False
    """A tool call was begun that is not one; it is part of `content`."""
    reasoning: str = ""


class CallSyntax(Protocol):
    """How a model family writes tool calls."""

    frames_answers: bool = False
    """An answer without a call has markers around it, too: it is read by the syntax, with and without tools."""

    @property
    def name(self) -> str:
        """For logs and documentation."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that structure an output. Those that are single ids are recognized by their ids alone."""

    def beginning(self, name: str | None) -> tuple[str, str]:
        """How an answer that must be a call (of `name`) begins: the family's words, and those with the tool's name."""

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        """The output that `pieces` are; `tools` are on offer."""


def cut_ids(tokenizer: Tokenizer, ids: Sequence[int], markers: Sequence[str]) -> list[Piece]:
    """Cut an output at its `markers`; adjoining texts are one piece."""
    by_id = {tokenizer.marker_id(marker): marker for marker in markers}
    by_text = [marker for marker in markers if tokenizer.marker_id(marker) is None]
    pieces: list[Piece] = []
    begin = 0
    for position, token_id in enumerate(ids):
        if token_id in by_id:
            pieces += cut_text(tokenizer.decode(ids[begin:position]), by_text)
            pieces.append(Piece(by_id[token_id], is_marker=True))
            begin = position + 1
    return pieces + cut_text(tokenizer.decode(ids[begin:]), by_text)


def cut_text(text: str, markers: Sequence[str]) -> list[Piece]:
    """Cut a text in which markers are written out."""
    if not markers:
        return [Piece(text)] if text else []
    parts = re.split("(" + "|".join(map(re.escape, markers)) + ")", text)
    return [Piece(part, is_marker=i % 2 == 1) for i, part in enumerate(parts) if part]


def cut_before(pieces: Sequence[Piece], stop: str) -> list[Piece]:
    """Keep the pieces before the first `stop`, which may be a marker or reach over one."""
    text = "".join(piece.text for piece in pieces)
    left = text.index(stop) if stop in text else len(text)
    before: list[Piece] = []
    for piece in pieces:
        if left <= 0:
            break
        before.append(piece if len(piece.text) <= left else Piece(piece.text[:left]))
        left -= len(piece.text)
    return before


def read_calls(
    pieces: Sequence[Piece], begin: str, end: str, read: Callable[[str], ToolCall | None], around: Sequence[str] = ()
) -> ParsedOutput:
    """The calls that `read` finds between each `begin` and the next `end`, and the content around them.

    The markers `around` the calls are no content. Without a call everything is content as it stands, and so it is when
    the markers do not pair up.
    """
    inside: list[str] = []
    outside: list[str] = []
    block: list[str] | None = None
    for piece in pieces:
        if piece == Piece(end, is_marker=True):
            if block is None:
                return as_malformed(pieces)
            inside.append("".join(block))
            block = None
        elif block is None and piece == Piece(begin, is_marker=True):
            block = []
        else:
            (outside if block is None else block).append(piece.text)
    if block is not None:
        return as_malformed(pieces)
    content = "".join(outside)
    if not inside:
        return ParsedOutput(content)
    for marker in around:
        content = content.replace(marker, "")
    return whole_calls(pieces, content.strip(), [read(each) for each in inside])


def tool_call(name: object, arguments: object) -> ToolCall | None:
    """A call that can be served: a name, and a JSON object that every parser accepts; None when it is not one."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()  # half a surrogate pair, written as an escape, is no text
    except (ValueError, TypeError, RecursionError):
        return None
    return ToolCall(name, text)


def decode_json(text: str) -> object:
    """The value of JSON `text`; None when it is not JSON, which an agent's parser would refuse (NaN, say)."""
    try:
        value: object = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value


def as_malformed(pieces: Sequence[Piece]) -> ParsedOutput:
    """The output as it stands, with a call in it that is not one."""
    return ParsedOutput("".join(piece.text for piece in pieces), malformed=True)


def whole_calls(pieces: Sequence[Piece], content: str, calls: Sequence[ToolCall | None]) -> ParsedOutput:
    """`content` and `calls`, or the output as it stands when one of the calls is none."""
    whole = tuple(call for call in calls if call is not None)
    return as_malformed(pieces) if len(whole) < len(calls) else ParsedOutput(content, whole)
