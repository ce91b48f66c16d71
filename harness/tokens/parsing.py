"""The parts of an output: pieces between markers, content, reasoning and tool calls.

Parsing returns whatever the model wrote: calls that are malformed, cut off or nested become content as they stand, and
`malformed` says so. Nothing is repaired. Ids are never changed here.

Every syntax reads an output piece by piece (`CallReader`). The text that such a reader has given out is never taken
back, whatever follows, and a whole output is read in the same way, to its end.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

from harness.types import Json, refuse_constant

_ARGUMENTS = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_VALUES = json.JSONDecoder(parse_constant=refuse_constant)
_JSON_STRINGS = re.compile(r"\\.|(\")", re.DOTALL)


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


class Delta(NamedTuple):
    """The next text of an output that is being sampled."""

    reasoning: str = ""
    content: str = ""


class CallReader(Protocol):
    """Reads the pieces of one output in one call syntax, while they are sampled."""

    def push(self, piece: Piece) -> Delta:
        """The text that became final with `piece`; what may still be, or become, part of a call waits."""

    def end(self) -> ParsedOutput:
        """What is left behind the deltas, as nothing follows it: further text, and the calls."""


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

    def open(self, tools: Sequence[Json]) -> CallReader:
        """A reader of an output for which `tools` are on offer."""
        return ReaderBeforeCalls(self, tools)

    def may_begin_call(self, piece: Piece, before: str | None) -> bool:
        """Whether a call may begin with `piece`.

        Before it there is white space only, which is `before`, or some text (None).
        """
        del before
        return piece.is_marker and piece.text in self.markers

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        """The output, or the end of one, that `pieces` are; `tools` are on offer.

        White space at the end of the content goes where there are calls.
        """


class ReaderBeforeCalls:
    """Gives text out up to where a call may begin: if it is none, everything behind that is content as it stands."""

    def __init__(self, syntax: CallSyntax, tools: Sequence[Json]) -> None:
        self._syntax = syntax
        self._tools = tools
        self._space = ""  # belongs to the content, unless a call follows
        self._has_begun = False
        self._waiting: list[Piece] = []

    def push(self, piece: Piece) -> Delta:
        """See `CallReader`."""
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
        """See `CallReader`."""
        return self._syntax.parse(self._waiting, self._tools) if self._waiting else ParsedOutput(self._space)


class TextReader:
    """Reads an output in which nothing is a call."""

    def push(self, piece: Piece) -> Delta:
        """See `CallReader`."""
        return Delta(content=piece.text)

    def end(self) -> ParsedOutput:
        """See `CallReader`."""
        return ParsedOutput("")


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
    pieces: Sequence[Piece],
    begin: str,
    end: str,
    read: Callable[[str], ToolCall | None],
    *,
    around: Sequence[str] = (),
    quotes: re.Pattern[str] = _JSON_STRINGS,
) -> ParsedOutput:
    """The calls that `read` finds between each `begin` and its `end`, and the content around them.

    An `end` inside a value is part of the value: what matches the group of `quotes` opens a value and closes it. The
    markers `around` the calls are no content. Without a call everything is content as it stands, and so it is when the
    markers do not pair up.
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
            for quote in () if piece.is_marker else quotes.finditer(piece.text):
                is_quoted ^= quote.lastindex is not None
    if block is not None:
        return as_malformed(pieces)
    if not inside:
        return ParsedOutput("".join(piece.text for piece in outside))
    content = "".join(piece.text for piece in outside if not (piece.is_marker and piece.text in around))
    return whole_calls(pieces, content.rstrip(), [read(each) for each in inside])


def _join_text(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces, with the text between two markers in one."""
    for is_marker, run in groupby(pieces, key=attrgetter("is_marker")):
        if is_marker:
            yield from run
        else:
            yield Piece("".join(piece.text for piece in run))


def tool_call(name: object, arguments: object) -> ToolCall | None:
    """A call that can be served: a name, and a JSON object that every parser accepts; None when it is not one."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = _ARGUMENTS.encode(arguments)
        (name + text).encode()  # half a surrogate pair, written as an escape, is no text
    except (ValueError, TypeError, RecursionError):
        return None
    return ToolCall(name, text)


def decode_json(text: str) -> object:
    """The value of JSON `text`; None when it is not JSON, which an agent's parser would refuse (NaN, say)."""
    try:
        value: object = _VALUES.decode(text)
    except (ValueError, RecursionError):
        return None
    return value


def decode_json_at(text: str, position: int) -> tuple[object, int]:
    """The value that begins at `position` of `text`, and where it ends; None, and the end of `text`, without one."""
    try:
        value, end = _VALUES.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None, len(text)
    return value, end


def as_malformed(pieces: Sequence[Piece]) -> ParsedOutput:
    """The output as it stands, with a call in it that is not one."""
    return ParsedOutput("".join(piece.text for piece in pieces), malformed=True)


def whole_calls(pieces: Sequence[Piece], content: str, calls: Sequence[ToolCall | None]) -> ParsedOutput:
    """`content` and `calls`, or the output as it stands when one of the calls is none."""
    whole = tuple(call for call in calls if call is not None)
    return as_malformed(pieces) if len(whole) < len(calls) else ParsedOutput(content, whole)
