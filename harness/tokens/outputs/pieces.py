"""An output in pieces, while it is sampled: markers, and the text between them.

However the ids arrive, the pieces put together are the same. Text waits as long as it may still become something else:
a character, a marker that is written out, a stop string.
"""

import re
from collections.abc import Sequence

from harness.tokens.incremental import IncrementalDecoder
from harness.tokens.parsing import Piece, cut_before
from harness.tokens.tokenizer import Tokenizer


class Markers:
    """The markers of a family, as they are found in its outputs.

    A marker that is one id of the vocabulary is recognized by that id and nothing else: the same characters spelled out
    with other ids, copied from a message say, are text. Markers that the vocabulary lacks are found in the text; none
    of them is part of another.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Sequence[str]) -> None:
        ids = {marker: tokenizer.marker_id(marker) for marker in markers}
        self.by_id = {token_id: marker for marker, token_id in ids.items() if token_id is not None}
        self.spelled = [marker for marker, token_id in ids.items() if token_id is None]
        self.pattern = re.compile("(" + "|".join(map(re.escape, self.spelled)) + ")")
        self.byte_ids = tokenizer.byte_ids
        self.decode = tokenizer.decode


class PieceCutter:
    """Cuts one output at its markers."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._decoder = IncrementalDecoder(markers.decode, markers.byte_ids)
        self._waiting = ""

    def push(self, ids: Sequence[int]) -> list[Piece]:
        """The pieces that became final with `ids`."""
        by_id = self._markers.by_id
        pieces: list[Piece] = []
        begin = 0
        for position in [at for at, token_id in enumerate(ids) if token_id in by_id]:
            pieces += self._end_text(ids[begin:position])
            pieces.append(Piece(by_id[ids[position]], is_marker=True))
            begin = position + 1
        text = self._decoder.push(ids[begin:])
        return pieces + (self._cut(text) if text else [])

    def end(self) -> list[Piece]:
        """The pieces that are left, as nothing follows them."""
        return self._end_text(())

    def _end_text(self, ids: Sequence[int]) -> list[Piece]:
        text = self._decoder.push(ids) + self._decoder.end()
        pieces = self._cut(text)
        waiting, self._waiting = self._waiting, ""
        return [*pieces, Piece(waiting)] if waiting else pieces

    def _cut(self, text: str) -> list[Piece]:
        """The pieces of the text that waited and of `text`; what may be the beginning of a marker waits."""
        if not self._markers.spelled:
            return [Piece(text)] if text else []
        *parts, last = self._markers.pattern.split(self._waiting + text)
        held = begun_by(last, self._markers.spelled)
        self._waiting = last[len(last) - held :]
        parts.append(last[: len(last) - held])
        return [Piece(part, is_marker=i % 2 == 1) for i, part in enumerate(parts) if part]


class StopGate:
    """Lets pieces through up to where one of the stop strings begins, or may begin."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._waiting: list[Piece] = []
        self._is_shut = False

    def push(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces that no stop string can take away any more."""
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
        """The pieces that are left, up to the string that has stopped the output."""
        return self._waiting if stop is None else cut_before(self._waiting, stop)

    def _let_through(self, characters: int) -> list[Piece]:
        """The first so many characters; a marker goes, or stays, as a whole."""
        for i, piece in enumerate(self._waiting):
            if len(piece.text) > characters:
                cut = 0 if piece.is_marker else characters
                passed = [*self._waiting[:i], *([Piece(piece.text[:cut])] if cut else [])]
                self._waiting = [piece._replace(text=piece.text[cut:]), *self._waiting[i + 1 :]]
                return passed
            characters -= len(piece.text)
        passed, self._waiting = self._waiting, []
        return passed


def begun_by(text: str, words: Sequence[str]) -> int:
    """How many characters at the end of `text` are the beginning of one of the words, and not the whole of it."""
    longest = 0
    for word in words:
        begin = text.find(word[:1], max(0, len(text) - len(word) + 1))
        while begin >= 0 and not word.startswith(text[begin:]):
            begin = text.find(word[:1], begin + 1)
        longest = max(longest, len(text) - begin if begin >= 0 else 0)
    return longest
