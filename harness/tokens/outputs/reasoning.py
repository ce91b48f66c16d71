"""Separation of reasoning from the rest of an output, while it is sampled.

Reasoning stands between a family's two markers, without line breaks around it. The prompt may have begun it. A call
inside closed reasoning is a draft. Reasoning that is never closed ends where a call begins, so from there on everything
waits for one of the two. Some families write markers around the rest, too.
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
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
    ("Here is my thought process:", "Here is my response:"),  # Granite 3.2
)
ANSWER_MARKERS = {"<|START_RESPONSE|>": "<|END_RESPONSE|>", "<|START_TEXT|>": "<|END_TEXT|>"}
"""Markers around content, as Cohere's models write them behind reasoning, in its place or to end it."""
TEMPLATE_ANSWERS = {"<response>": "</response>", "<answer>": "</answer>"}
"""Markers around content if a template has them (ERNIE, Granite 3.3, Hunyuan). Elsewhere they are the agent's."""
_BEGINS = ANSWER_MARKERS | TEMPLATE_ANSWERS


def find_markers(tokenizer: Tokenizer, template_source: str) -> tuple[str, str] | None:
    """Return the markers that are ids, preferably named in the template, else those that it spells out, or None."""

    def fit(pair: tuple[str, str]) -> tuple[bool, int]:
        return None not in map(tokenizer.marker_id, pair), sum(marker in template_source for marker in pair)

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
    ANSWER = auto()
    """After the marker before an answer, where line breaks are skipped, too."""
    REST = auto()


class ReasoningSplit:
    def __init__(self, markers: tuple[str, str], call_markers: Sequence[str], *, is_open: bool) -> None:
        self._begin, self._end = (Piece(marker, is_marker=True) for marker in markers)
        self._call_markers = call_markers
        self._place = _MarkerPlace.INSIDE if is_open else _MarkerPlace.BEFORE
        self._waiting: list[Piece] = []
        self._has_begun = False
        self._answer_ends = {*ANSWER_MARKERS.values()}

    def push(self, piece: Piece) -> Split:
        """Return the part of the output that became final with `piece`."""
        match self._place:
            case _MarkerPlace.BEFORE:
                return self._push_before(piece)
            case _MarkerPlace.INSIDE | _MarkerPlace.DRAFT:
                return self._push_inside(piece)
            case _MarkerPlace.BEHIND if self._begins_answer(piece):
                self._place = _MarkerPlace.ANSWER
                return Split()
            case _MarkerPlace.BEHIND | _MarkerPlace.ANSWER:
                kept = piece if piece.is_marker else Piece(piece.text.lstrip("\n"))
                return self._push_rest(kept) if kept.text else Split()
            case _MarkerPlace.REST:
                return self._push_rest(piece)

    def end(self) -> Split:
        if self._place in (_MarkerPlace.INSIDE, _MarkerPlace.REST):  # only line breaks wait, or an answer's end
            return Split()
        if self._place is _MarkerPlace.DRAFT and not self._waiting[0].is_marker:
            self._waiting.pop(0)
        return Split(rest=self._take_waiting())

    def _push_before(self, piece: Piece) -> Split:
        if piece == self._begin or self._begins_answer(piece):
            self._waiting, self._place = [], _MarkerPlace.INSIDE if piece == self._begin else _MarkerPlace.ANSWER
            return Split()
        if not piece.is_marker and not piece.text.strip():
            self._waiting.append(piece)
            return Split()
        return Split(rest=[*self._take_waiting(), *self._push_rest(piece).rest])

    def _push_rest(self, piece: Piece) -> Split:
        self._place = _MarkerPlace.REST
        if piece.is_marker and piece.text in self._answer_ends:
            waited, self._waiting = self._waiting, [piece]
            return Split(rest=waited)
        self._waiting.append(piece)
        # Behind the end of an answer white space waits with it, because it is content only before further text.
        ends = self._waiting[0] is not piece and not piece.text.strip()
        return Split() if ends else Split(rest=self._take_waiting())

    def _push_inside(self, piece: Piece) -> Split:
        begins_answer = piece.text in ANSWER_MARKERS and self._begins_answer(piece)
        if piece == self._end or begins_answer:
            self._place = _MarkerPlace.ANSWER if begins_answer else _MarkerPlace.BEHIND
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

    def _begins_answer(self, piece: Piece) -> bool:
        if begins := piece.is_marker and piece.text in _BEGINS:
            self._answer_ends.add(_BEGINS[piece.text])
        return begins

    def _give(self, text: str) -> str:
        text = text if self._has_begun else text.lstrip("\n")
        self._has_begun = self._has_begun or bool(text)
        return text

    def _take_waiting(self) -> list[Piece]:
        waiting, self._waiting = self._waiting, []
        return waiting
