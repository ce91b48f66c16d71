"""An output cut at the markers that structure it.

A marker that is one id of the vocabulary is recognized by that id and nothing else: the same characters spelled out
with other ids, copied from a message say, are text. Markers that the vocabulary lacks are found in the text.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness.tokens.tokenizer import Tokenizer


class Piece(NamedTuple):
    """A marker, or the text between two."""

    text: str
    is_marker: bool = False


class Blocks(NamedTuple):
    """Text between pairs of markers, and around them."""

    inside: list[str]
    outside: str


def cut_ids(tokenizer: Tokenizer, ids: Sequence[int], markers: Sequence[str]) -> list[Piece]:
    """The pieces of an output; adjoining texts are one."""
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
    """The pieces of a text in which markers are written out."""
    if not markers:
        return [Piece(text)] if text else []
    parts = re.split("(" + "|".join(map(re.escape, markers)) + ")", text)
    return [Piece(part, is_marker=i % 2 == 1) for i, part in enumerate(parts) if part]


def cut_before(pieces: Sequence[Piece], stop: str) -> list[Piece]:
    """The pieces before the first `stop`, which may be a marker or reach over one."""
    text = "".join(piece.text for piece in pieces)
    left = text.index(stop) if stop in text else len(text)
    return list(_shorten(pieces, left))


def blocks_between(pieces: Sequence[Piece], begin: str, end: str) -> Blocks | None:
    """What stands between `begin` and the next `end`; None when they do not pair up."""
    inside: list[str] = []
    outside: list[str] = []
    block: list[str] | None = None
    for piece in pieces:
        if piece == Piece(end, is_marker=True):
            if block is None:
                return None
            inside.append("".join(block))
            block = None
        elif block is None and piece == Piece(begin, is_marker=True):
            block = []
        else:
            (outside if block is None else block).append(piece.text)
    return Blocks(inside, "".join(outside)) if block is None else None


def _shorten(pieces: Sequence[Piece], left: int) -> Iterator[Piece]:
    for piece in pieces:
        if left <= 0:
            return
        yield piece if len(piece.text) <= left else Piece(piece.text[:left])
        left -= len(piece.text)
