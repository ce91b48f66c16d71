"""Separation of reasoning from the rest of an output, while it is sampled.

Reasoning stands between a family's two markers, without line breaks around it. The prompt may have begun it. A call
inside closed reasoning is a draft. Reasoning that is never closed ends where a call begins, so from there on everything
waits for one of the two.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from harness.tokens.parsing import Piece
from harness.tokens.tokenizer import Tokenizer

REASONING_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Magistral, Ministral
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),  # MiniMax-M3
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<|channel>thought", "<channel|>"),  # Gemma 4
)
ANSWER_BEGINS, ANSWER_ENDS = ("<|START_RESPONSE|>", "<|START_TEXT|>"), ("<|END_RESPONSE|>", "<|END_TEXT|>")
"""Markers around content, as Cohere's models write them behind reasoning or in its place."""


def find_markers(tokenizer: Tokenizer, template_source: str) -> tuple[str, str] | None:
    """Return the markers that are ids, preferably named in the template, else those that it spells out, or None."""

    def fit(pair: tuple[str, str]) -> tuple[bool, bool]:
        return None not in map(tokenizer.marker_id, pair), any(marker in template_source for marker in pair)

    best = max(REASONING_MARKERS, key=fit)
    return best if any(fit(best)) else None


class Split(NamedTuple):
    reasoning: str = ""
    rest: Sequence[Piece] = ()


class _MarkerPlace(Enum):
    BEFORE = auto()
    """White space only so far."""
    INSIDE = auto()
    DRAFT = auto()
    """Inside reasoning, after the beginning of a call."""
    BEHIND = auto()
    """After reasoning, where line breaks are skipped."""
    REST = auto()


class ReasoningSplit:
    def __init__(self, markers: tuple[str, str], call_markers: Sequence[str], *, is_open: bool) -> None:
        self._begin, self._end = (Piece(marker, is_marker=True) for marker in markers)
        self._call_markers = call_markers
        self._place = _MarkerPlace.INSIDE if is_open else _MarkerPlace.BEFORE
        self._waiting: list[Piece] = []
        self._has_begun = False

    def push(self, piece: Piece) -> Split:
        """Return the part of the output that became final with `piece`."""
        match self._place:
            case _MarkerPlace.BEFORE:
                return self._push_before(piece)
            case _MarkerPlace.INSIDE | _MarkerPlace.DRAFT:
                return self._push_inside(piece)
            case _MarkerPlace.BEHIND if piece.is_marker and piece.text in ANSWER_BEGINS:
                self._place = _MarkerPlace.REST
                return Split()
            case _MarkerPlace.BEHIND:
                kept = piece if piece.is_marker else Piece(piece.text.lstrip("\n"))
                self._place = _MarkerPlace.REST if kept.text else _MarkerPlace.BEHIND
                return Split(rest=[kept] if kept.text else [])
            case _MarkerPlace.REST:
                return Split(rest=[piece])

    def end(self) -> Split:
        if self._place is _MarkerPlace.INSIDE:  # only line breaks wait, which are dropped
            return Split()
        if self._place is _MarkerPlace.DRAFT and not self._waiting[0].is_marker:
            self._waiting.pop(0)
        return Split(rest=self._take_waiting())

    def _push_before(self, piece: Piece) -> Split:
        if piece == self._begin or (piece.is_marker and piece.text in ANSWER_BEGINS):
            self._waiting, self._place = [], _MarkerPlace.INSIDE if piece == self._begin else _MarkerPlace.REST
            return Split()
        self._waiting.append(piece)
        if not piece.is_marker and not piece.text.strip():
            return Split()
        self._place = _MarkerPlace.REST
        return Split(rest=self._take_waiting())

    def _push_inside(self, piece: Piece) -> Split:
        begins_answer = piece.is_marker and piece.text in ANSWER_BEGINS
        if piece == self._end or begins_answer:
            self._place = _MarkerPlace.REST if begins_answer else _MarkerPlace.BEHIND
            return Split(self._give("".join(each.text for each in self._take_waiting()).rstrip("\n")))
        self._waiting.append(piece)
        if self._place is _MarkerPlace.DRAFT:
            return Split()
        if piece.is_marker and piece.text in self._call_markers:
            self._place = _MarkerPlace.DRAFT
            return Split()
        text = "".join(each.text for each in self._take_waiting())
        final = text.rstrip("\n")
        if len(final) < len(text):
            self._waiting = [Piece(text[len(final) :])]
        return Split(self._give(final))

    def _give(self, text: str) -> str:
        text = text if self._has_begun else text.lstrip("\n")
        self._has_begun = self._has_begun or bool(text)
        return text

    def _take_waiting(self) -> list[Piece]:
        waiting, self._waiting = self._waiting, []
        return waiting
