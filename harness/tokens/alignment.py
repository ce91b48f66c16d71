"""Alignment of two tokenizations of one text: chunks between the character boundaries that both have."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from harness.tokens.incremental import IncrementalDecoder
from harness.tokens.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Spelled(NamedTuple):
    ids: Sequence[int]
    text: str
    """See `Tokenizer.decode`."""
    ends: Sequence[int | None]
    """Characters up to the end of each id; None inside a character."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: Sequence[int]) -> "Spelled":
        decoder = IncrementalDecoder(tokenizer.decode, tokenizer.byte_ids)
        texts: list[str] = []
        ends: list[int | None] = []
        size = 0
        for token_id in ids:
            texts.append(decoder.push([token_id]))
            size += len(texts[-1])
            ends.append(None if decoder.is_waiting else size)
        text = "".join([*texts, decoder.end()])
        return cls(ids, text, [*ends[:-1], len(text)] if ends else [])


class Chunk(NamedTuple):
    """Ids that spell the same characters."""

    own: slice
    other: slice
    text: str


def align(own: Spelled, other: Spelled) -> list[Chunk]:
    """Return the smallest chunks, which cover both; none for different texts."""
    if own.text != other.text or not own.ids or not other.ids:
        return []
    reached, reached_too = _first_at(own.ends), _first_at(other.ends)
    shared = sorted(reached.keys() & reached_too.keys() - {0, len(own.text)})
    marks = [(0, 0, 0), *((reached[at], reached_too[at], at) for at in shared)]
    marks.append((len(own.ids), len(other.ids), len(own.text)))
    return [
        Chunk(slice(start, stop), slice(start_too, stop_too), own.text[begin:end])
        for (start, start_too, begin), (stop, stop_too, end) in pairwise(marks)
    ]


def _first_at(ends: Iterable[int | None]) -> dict[int, int]:
    """Return the fewest ids up to each character boundary."""
    found: dict[int, int] = {}
    for count, end in enumerate(ends, start=1):
        if end is not None:
            found.setdefault(end, count)
    return found
