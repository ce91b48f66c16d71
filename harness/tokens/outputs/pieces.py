"""Pieces of an output while it is sampled: markers, and the text between them.

The joined pieces do not depend on how the ids arrive. Text waits while it may become something else: a character, a
spelled-out marker, a stop string.
"""

import re
from collections.abc import Sequence

from harness.tokens.incremental import IncrementalDecoder
from harness.tokens.parsing import Piece, cut_before
from harness.tokens.tokenizer import Tokenizer


class Markers:
    """Markers of a family, as found in its outputs.

    A marker that is one id is recognized by that id alone: the same characters in other ids, such as a copied message,
    are text. Markers outside the vocabulary are found in the text.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Sequence[str]) -> None:
        ids = {marker: tokenizer.marker_id(marker) for marker in markers}
        self.by_id = {token_id: marker for marker, token_id in ids.items() if token_id is not None}
        self.spelled = [marker for marker, token_id in ids.items() if token_id is None]  # none is part of another
        self.pattern = re.compile("(" + "|".join(map(re.escape, self.spelled)) + ")")
        self.byte_ids = tokenizer.byte_ids
        self.decode = tokenizer.decode


class PieceCutter:
    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._decoder = IncrementalDecoder(markers.decode, markers.byte_ids)
        self._waiting = ""

    def push(self, ids: Sequence[int]) -> list[Piece]:
        by_id = self._markers.by_id
        pieces: list[Piece] = []
        begin = 0
        for marker_id in filter(by_id.__contains__, ids):
            position = ids.index(marker_id, begin)
            pieces += self._end_text(ids[begin:position])
            pieces.append(Piece(by_id[marker_id], is_marker=True))
            begin = position + 1
        text = self._decoder.push(ids[begin:])
        return pieces + (self._cut(text) if text else [])

    def end(self) -> list[Piece]:
        return self._end_text(())

    def _end_text(self, ids: Sequence[int]) -> list[Piece]:
        text = self._decoder.push(ids) + self._decoder.end()
        pieces = self._cut(text)
        waiting, self._waiting = self._waiting, ""
        return [*pieces, Piece(waiting)] if waiting else pieces

    def _cut(self, text: str) -> list[Piece]:
        if not self._markers.spelled:
            return [Piece(text)] if text else []
        *parts, last = self._markers.pattern.split(self._waiting + text)
        held = begun_by(last, self._markers.spelled)
        self._waiting = last[len(last) - held :]
        parts.append(last[: len(last) - held])
        return [Piece(part, is_marker=i % 2 == 1) for i, part in enumerate(parts) if part]


class StopGate:
    """Gate that passes pieces up to a possible stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._waiting: list[Piece] = []
        self._is_shut = False

    def push(self, pieces: Sequence[Piece]) -> list[Piece]:
        if not self._stops:
            return list(pieces)
        self._waiting += pieces
        if self._is_shut:
            return []
        text = "".join(piece.text for piece in self._waiting)
        begins = [text.index(stop) for stop in self._stops if stop in text]
        self._is_shut = bool(begins)
        return self._let_through(min([*begins, len(text) - begun_by(text, self._stops)]))

    def end(self, stop: str | None) -> list[Piece]:
        """Return the rest, up to the string that stopped the output."""
        return self._waiting if stop is None else cut_before(self._waiting, stop)

    def _let_through(self, characters: int) -> list[Piece]:
        for i, piece in enumerate(self._waiting):
            if len(piece.text) > characters:
                cut = 0 if piece.is_marker else characters  # a marker passes, or stays, as a whole
                passed = [*self._waiting[:i], *([Piece(piece.text[:cut])] if cut else [])]
                self._waiting = [piece._replace(text=piece.text[cut:]), *self._waiting[i + 1 :]]
                return passed
            characters -= len(piece.text)
        passed, self._waiting = self._waiting, []
        return passed


def begun_by(text: str, words: Sequence[str]) -> int:
    """Count the characters at the end of `text` that begin one of the words without completing it."""
    longest = 0
    for word in words:
        begin = text.find(word[:1], max(0, len(text) - len(word) + 1))
        while begin >= 0 and not word.startswith(text[begin:]):
            begin = text.find(word[:1], begin + 1)
        longest = max(longest, len(text) - begin if begin >= 0 else 0)
    return longest
