"""Delimiters kept from one turn to the next: ids where the template is fixed, holes where the messages' texts go.

A suffix is cut once per `Transition` and kept only if it gives the ids of the prefix trick on texts that break things;
texts go in as they are, trimmed or quoted, whichever the template does. One that does something else keeps the trick.
Texts are encoded as ordinary characters, so a marker inside one of them is harmless without further care.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from harness.tokens.delimiter import Transition, dummy_messages, dummy_tools
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, Message

TrickIds = Callable[[Transition, Sequence[Message], Sequence[Json]], list[int] | None]
"""The delimiter as the prefix trick gives it, for an answer that did not end itself and calls another tool."""

TrickText = Callable[[Transition, Sequence[Message], Sequence[Json]], str | None]
"""The same as text."""

_PLAIN_KEYS = frozenset({"role", "content", "tool_call_id", "is_error"})
TextForm = Callable[[str], str]
"""The change that a template makes to the text of a message."""


def _as_it_is(text: str) -> str:
    return text


_TEXT_FORMS: tuple[TextForm, ...] = (_as_it_is, str.strip, lambda text: json.dumps(text, ensure_ascii=False))
_MOST_MARKERS = 40  # some tokenizers have a thousand reserved ones
COMMON_TRANSITIONS = frozenset(
    Transition(system, after_tools, calls, roles, has_tools)
    for calls, roles in ((0, ("user",)), (1, ("tool",)), (2, ("tool", "tool")))
    for system, after_tools, has_tools in product((False, True), repeat=3)
)
"""The transitions that make up almost every session."""
_HARD_TEXTS = (
    "",
    "word",
    " lead",
    "trail ",
    "\n\nlines\n",
    "\t",
    "  ",
    "日本語 \N{FAMILY}",
    '"a" \\ {"b": [1]}',
    "'1",
)
"""Texts that a template may change or an encoder may join with the text around them."""


class _Fixed(NamedTuple):
    """A stretch of the delimiter that is always the same."""

    ids: tuple[int, ...]


class _Open(NamedTuple):
    """A stretch between two markers; a number is a hole for the text of that message."""

    pieces: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class CachedSuffix:
    """The delimiter of one transition."""

    runs: tuple[_Fixed | _Open, ...]
    first_marker: int | None
    """The marker with which it begins."""
    closes: bool
    """That is the one with which the template ends answers."""
    form: TextForm = _as_it_is

    def encode(self, contents: Sequence[str], tokenizer: Tokenizer, end: int | None) -> list[int]:
        """Ids with `contents` in the holes; an answer that ended itself with `end` needs no other end."""
        texts = [self.form(content) for content in contents]
        ids: list[int] = []
        is_written = end is not None and (self.closes or self.first_marker == end)
        for run in self.runs[1:] if is_written else self.runs:
            if isinstance(run, _Fixed):
                ids += run.ids
            else:
                filled = (piece if isinstance(piece, str) else texts[piece] for piece in run.pieces)
                ids += tokenizer.encode_plain("".join(filled))
        return ids


class KeptSuffixes:
    """The suffixes of one family, each cut when the first turn needs it: a server has started before all of them are.

    Args:
        end_ids: With which the template ends answers.
        text_of: What stands between two answers, as text.
        ids_of: The same as ids: what a suffix has to give.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: frozenset[int], text_of: TrickText, ids_of: TrickIds) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._text_of = text_of
        self._ids_of = ids_of
        self._kept: dict[Transition, CachedSuffix | None] = {}

    def find(self, transition: Transition) -> CachedSuffix | None:
        """The suffix of `transition`; None where there is none that is as good."""
        if transition not in COMMON_TRANSITIONS:
            return None
        if transition not in self._kept:
            self._kept[transition] = build_suffix(
                transition, self._tokenizer, self._end_ids, self._text_of, self._ids_of
            )
        return self._kept[transition]


def fillable_texts(messages: Sequence[Message]) -> list[str] | None:
    """The texts that go into the holes of a suffix; None when a message says more than its text."""
    if any(message.keys() - _PLAIN_KEYS or not isinstance(message["content"], str) for message in messages):
        return None
    return [message["content"] for message in messages]


def build_suffix(
    transition: Transition, tokenizer: Tokenizer, end_ids: frozenset[int], text_of: TrickText, ids_of: TrickIds
) -> CachedSuffix | None:
    """The suffix of `transition`, None when there is none that is as good as the prefix trick."""
    slots = [f"⟦{i}⟧" for i in range(len(transition.roles))]
    tools = dummy_tools() if transition.has_tools else ()
    text = text_of(transition, dummy_messages(transition.roles, slots), tools)
    candidates = () if text is None else _cut(text, slots, tokenizer, end_ids)
    return next((each for each in candidates if _is_right(each, transition, tokenizer, ids_of)), None)


def _cut(text: str, slots: Sequence[str], tokenizer: Tokenizer, end_ids: frozenset[int]) -> Iterator[CachedSuffix]:
    """`text` in runs, once for each form in which it has every slot once.

    `text` is cut at its markers, which the encoder never joins with the text beside them. Between two markers, a
    stretch without a slot always has the same ids; one with slots is encoded anew each time, as a whole, because the
    encoder may join a message's text with the template's.
    """
    stretches: list[str] = []
    position = 0
    for marker in tokenizer.marker_pattern.finditer(text):
        stretches += filter(None, (text[position : marker.start()], marker.group()))
        position = marker.end()
    stretches += filter(None, (text[position:],))
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
        first = tokenizer.marker_id(stretches[0])
        yield CachedSuffix(tuple(runs), first, first in end_ids, form)


def _is_right(suffix: CachedSuffix, transition: Transition, tokenizer: Tokenizer, ids_of: TrickIds) -> bool:
    """Whether `suffix` gives the ids of the prefix trick, with other tools, another called tool and other call ids."""
    markers = "".join(tokenizer.markers[:_MOST_MARKERS]) + "<tool_response>x</tool_response>"
    for text in (*_HARD_TEXTS, markers):
        texts = [text, f"{text}and{text}"][: len(transition.roles)]
        messages = dummy_messages(transition.roles, texts, call_ids="other")
        expected = ids_of(transition, messages, dummy_tools("seek") if transition.has_tools else ())
        if suffix.encode(texts, tokenizer, None) != expected:
            return False
    return True
