"""Delimiters kept between turns: ids where the template is fixed, holes for the messages' texts.

A suffix is kept only if it gives the ids of the prefix trick on hard texts, which go in unchanged, trimmed or quoted.
Texts are encoded as ordinary characters, so markers inside them are harmless.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from typing import NamedTuple

from harness.tokens.delimiter import Transition, dummy_messages, dummy_tools
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, Message

TrickIds = Callable[[Transition, Sequence[Message], Sequence[Json]], list[int] | None]
"""Function that returns a delimiter by the prefix trick, for an unfinished answer that calls another tool."""

TrickText = Callable[[Transition, Sequence[Message], Sequence[Json]], str | None]

_PLAIN_KEYS = frozenset({"role", "content", "tool_call_id", "is_error"})
TextForm = Callable[[str], str]
_TEXT_FORMS: tuple[TextForm, ...] = (str, str.strip, lambda text: json.dumps(text, ensure_ascii=False))
_MOST_MARKERS = 40  # some tokenizers have a thousand reserved ones
COMMON_TRANSITIONS = frozenset(
    Transition(system, after_tools, calls, roles, has_tools)
    for calls, roles in ((0, ("user",)), (1, ("tool",)), (2, ("tool", "tool")))
    for system, after_tools, has_tools in product((False, True), repeat=3)
)
"""Transitions of almost every session."""
_HARD_TEXTS = ("", "word", " lead", "trail ", "\n\nlines\n", "\t", "  ", "日本語 \N{FAMILY}", '"a" \\ {"b": [1]}', "'1")


class _Fixed(NamedTuple):
    ids: tuple[int, ...]


class _Open(NamedTuple):
    """Stretch between two markers. A number is a hole for the text of that message."""

    pieces: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class CachedSuffix:
    runs: tuple[_Fixed | _Open, ...]
    first_marker: int | None
    closing: int
    """Number of runs at the beginning by which the template ends an answer."""
    form: TextForm = str

    def encode(self, contents: Sequence[str], tokenizer: Tokenizer, end: int | None) -> list[int]:
        """Return the ids with `contents` in the holes. An answer that ended with `end` needs no other end."""
        texts = [self.form(content) for content in contents]
        ids: list[int] = []
        written = 0 if end is None else self.closing or int(self.first_marker == end)
        for run in self.runs[written:]:
            if isinstance(run, _Fixed):
                ids += run.ids
            else:
                filled = (piece if isinstance(piece, str) else texts[piece] for piece in run.pieces)
                ids += tokenizer.encode_plain("".join(filled))
        return ids


class KeptSuffixes:
    """Suffixes of one family, cut when a turn first needs them, so that a server starts sooner."""

    def __init__(self, tokenizer: Tokenizer, end_ids: frozenset[int], text_of: TrickText, ids_of: TrickIds) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._text_of = text_of
        self._ids_of = ids_of
        self._kept: dict[Transition, CachedSuffix | None] = {}

    def find(self, transition: Transition) -> CachedSuffix | None:
        if transition not in COMMON_TRANSITIONS:
            return None
        if transition not in self._kept:
            slots = [f"⟦{i}⟧" for i in range(len(transition.roles))]
            tools = dummy_tools() if transition.has_tools else ()
            text = self._text_of(transition, dummy_messages(transition.roles, slots), tools)
            candidates = () if text is None else _cut(text, slots, self._tokenizer, self._end_ids)
            self._kept[transition] = next((each for each in candidates if self._is_right(each, transition)), None)
        return self._kept[transition]

    def _is_right(self, suffix: CachedSuffix, transition: Transition) -> bool:
        markers = "".join(self._tokenizer.markers[:_MOST_MARKERS]) + "<tool_response>x</tool_response>"
        for text in (*_HARD_TEXTS, markers):
            texts = [text, f"{text}and{text}"][: len(transition.roles)]
            messages = dummy_messages(transition.roles, texts, call_ids="other")
            expected = self._ids_of(transition, messages, dummy_tools("seek") if transition.has_tools else ())
            if suffix.encode(texts, self._tokenizer, None) != expected:
                return False
        return True


def fillable_texts(messages: Sequence[Message]) -> list[str] | None:
    """Return the texts for the holes, or None if a message has more than its text."""
    if any(message.keys() - _PLAIN_KEYS or not isinstance(message["content"], str) for message in messages):
        return None
    return [message["content"] for message in messages]


def _cut(text: str, slots: Sequence[str], tokenizer: Tokenizer, end_ids: frozenset[int]) -> Iterator[CachedSuffix]:
    # The encoder never joins a marker with adjacent text. Between two markers, a stretch without a slot always has
    # the same ids. One with slots is encoded each time as a whole, because the encoder may join a message's text with
    # the template's.
    stretches: list[str] = []
    position = 0
    for marker in tokenizer.marker_pattern.finditer(text):
        stretches += filter(None, (text[position : marker.start()], marker.group()))
        position = marker.end()
    stretches += filter(None, (text[position:],))
    markers = [*map(tokenizer.marker_id, stretches)]
    begin = takewhile(lambda i: markers[i] is not None or stretches[i].isspace(), range(len(stretches)))
    closing = next((i + 1 for i in begin if markers[i] in end_ids), 0)
    for form in _TEXT_FORMS:
        marks = [form(slot) for slot in slots]
        if any(text.count(mark) != 1 for mark in marks):
            continue
        runs: list[_Fixed | _Open] = []
        for stretch in stretches:
            pieces = re.split("|".join(f"({re.escape(mark)})" for mark in marks), stretch)
            if len(pieces) == 1:
                runs.append(_Fixed(tuple(tokenizer.encode(stretch))))
            else:
                runs.append(_Open(tuple(marks.index(piece) if piece in marks else piece for piece in pieces if piece)))
        yield CachedSuffix(tuple(runs), markers[0], closing, form)
