"""What an agent gets to read of an output: content, reasoning and tool calls.

Whatever the model wrote, parsing returns: an output whose calls are malformed, cut off or nested becomes content as it
stands, and `malformed` says so. Nothing is repaired. Ids are never changed here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from harness.tokens.pieces import Piece
from harness.types import Json


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
    reasoning: str = ""


class CallSyntax(Protocol):
    """How a model family writes tool calls."""

    @property
    def name(self) -> str:
        """For logs and documentation."""

    @property
    def markers(self) -> tuple[str, ...]:
        """What structures an output. Those that are single ids are recognized by their ids alone."""

    def beginning(self, name: str | None) -> tuple[str, str]:
        """How an answer that must be a call (of `name`) begins: the family's words, and those with the tool's name."""

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        """The output that `pieces` are; `tools` are on offer."""


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
        value: object = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value


def malformed(pieces: Sequence[Piece]) -> ParsedOutput:
    """The output as it stands."""
    return ParsedOutput("".join(piece.text for piece in pieces), malformed=True)


def whole_calls(pieces: Sequence[Piece], content: str, calls: Sequence[ToolCall | None]) -> ParsedOutput:
    """`content` and `calls`, or the output as it stands when one of the calls is none."""
    whole = tuple(call for call in calls if call is not None)
    return malformed(pieces) if len(whole) < len(calls) else ParsedOutput(content, whole)


def _refuse_constant(name: str) -> None:
    """NaN and Infinity are not JSON; an agent's parser would fail on them."""
    raise ValueError(name)
