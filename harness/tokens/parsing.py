"""Parts of an output: pieces between markers, content, reasoning and tool calls.

Malformed, cut-off or nested calls become content unchanged, and `malformed` is set. Nothing is repaired. A reader never
takes back text that it returned.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

from harness.types import Json, refuse_constant, unique_keys

_ARGUMENTS = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_VALUES = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=refuse_constant)


class Piece(NamedTuple):
    text: str
    is_marker: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call. `arguments` is the JSON text of an object."""

    name: str
    arguments: str

    def to_json(self, call_id: str) -> Json:
        """Return the call as chat messages have it."""
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: bool = False
    """True if `content` has a tool call that is not valid."""
    reasoning: str = ""


class Delta(NamedTuple):
    reasoning: str = ""
    content: str = ""


class CallReader(Protocol):
    def push(self, piece: Piece) -> Delta:
        """Return the text that became final with `piece`. Text that may become part of a call waits."""

    def end(self) -> ParsedOutput:
        """Return further text, and the calls."""


class CallSyntax(Protocol):
    frames_answers: bool = False
    """True if answers without a call have markers, too."""

    name: str
    """Name for logs."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that structure an output. Single ids are recognized by id alone."""

    def beginning(self, name: str | None) -> tuple[str, str]:
        """Return the beginning of a required call: the family's text, and the text with the tool's name."""

    def open(self, tools: Sequence[Json]) -> CallReader:
        return ReaderBeforeCalls(self, tools)

    def may_begin_call(self, piece: Piece, before: str | None) -> bool:
        """Return True if a call may begin with `piece`. `before` is the white space before it, or None after text."""
        return piece.is_marker and piece.text in self.markers

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        """Return the parts of an output, or of its end. Beside calls, white space at the end of content is dropped."""


class ReaderBeforeCalls:
    """`CallReader` that returns text up to a possible call."""

    def __init__(self, syntax: CallSyntax, tools: Sequence[Json]) -> None:
        self._syntax = syntax
        self._tools = tools
        self._space = ""  # belongs to the content, unless a call follows
        self._has_begun = False
        self._waiting: list[Piece] = []

    def push(self, piece: Piece) -> Delta:
        if self._waiting:
            self._waiting.append(piece)
            return Delta()
        if self._syntax.may_begin_call(piece, None if self._has_begun else self._space):
            self._waiting = [Piece(self._space), piece]
            return Delta()
        text = self._space + piece.text
        final = text.rstrip()
        self._space = text[len(final) :]
        self._has_begun = self._has_begun or bool(final)
        return Delta(content=final)

    def end(self) -> ParsedOutput:
        return self._syntax.parse(self._waiting, self._tools) if self._waiting else ParsedOutput(self._space)


class TextReader:
    """`CallReader` of outputs without calls."""

    def push(self, piece: Piece) -> Delta:
        return Delta(content=piece.text)

    def end(self) -> ParsedOutput:
        return ParsedOutput("")


def cut_before(pieces: Sequence[Piece], stop: str) -> list[Piece]:
    """Keep the pieces before the first `stop`, which may span a marker."""
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
    pieces: Sequence[Piece],
    begin: str,
    end: str,
    read: Callable[[str], Sequence[ToolCall | None]],
    *,
    around: Sequence[str],
    count_quotes: Callable[[str], int],
) -> ParsedOutput:
    """Return the calls that `read` finds between each `begin` and its `end`, and the content around them.

    Each of the quotes that `count_quotes` finds opens or closes a value, in which `end` is text. The markers `around`
    the calls are not content. Without a call, or with unpaired markers, everything is content.
    """
    inside: list[str] = []
    outside: list[Piece] = []
    block: list[str] | None = None
    is_quoted = False
    for piece in _join_text(pieces):
        if piece == Piece(end, is_marker=True) and not is_quoted:
            if block is None:
                return as_malformed(pieces)
            inside.append("".join(block))
            block = None
        elif block is None and piece == Piece(begin, is_marker=True):
            block = []
        elif block is None:
            outside.append(piece)
        else:
            block.append(piece.text)
            is_quoted ^= not piece.is_marker and count_quotes(piece.text) % 2 == 1
    if block is not None:
        return as_malformed(pieces)
    if not inside:
        return ParsedOutput("".join(piece.text for piece in outside))
    content = "".join(piece.text for piece in outside if not (piece.is_marker and piece.text in around))
    return whole_calls(pieces, content.rstrip(), [call for each in inside for call in read(each) or [None]])


def _join_text(pieces: Sequence[Piece]) -> Iterator[Piece]:
    for is_marker, run in groupby(pieces, key=attrgetter("is_marker")):
        if is_marker:
            yield from run
        else:
            yield Piece("".join(piece.text for piece in run))


def tool_call(name: object, arguments: object) -> ToolCall | None:
    """Return a call whose arguments every parser accepts."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = _ARGUMENTS.encode(arguments)
        (name + text).encode()  # raises on a lone surrogate, written as an escape
    except (ValueError, TypeError, RecursionError):
        return None
    return ToolCall(name, text)


def decode_json(text: str) -> object:
    """Return the value of JSON `text`, or None if parsers refuse or lose a part of it (NaN, a repeated key)."""
    try:
        value: object = _VALUES.decode(text)
    except (ValueError, RecursionError):
        return None
    return value


def decode_json_at(text: str, position: int) -> tuple[object, int]:
    """Return the value at `position` and its end, or None and the end of `text`."""
    try:
        value, end = _VALUES.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None, len(text)
    return value, end


def begins_json(text: str) -> bool:
    """Return True for JSON, also if it is cut off after the beginning of an object or array."""
    return text.lstrip().startswith(("{", "[")) or decode_json(text) is not None


def as_malformed(pieces: Sequence[Piece]) -> ParsedOutput:
    return ParsedOutput("".join(piece.text for piece in pieces), malformed=True)


def whole_calls(pieces: Sequence[Piece], content: str, calls: Sequence[ToolCall | None]) -> ParsedOutput:
    whole = tuple(call for call in calls if call is not None)
    return as_malformed(pieces) if len(whole) < len(calls) else ParsedOutput(content, whole)
