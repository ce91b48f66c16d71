"""Text that appears token by token, the stop strings in it, and the alignment of two tokenizations of one text."""

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from harness.tokens.tokenizer import Tokenizer

_LONGEST_WINDOW = 16  # ids; then it is cut back
_SHORTEST_WINDOW = 8  # ids: a pending character and context, because sub-word decoders look to their left
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4  # bytes


class IncrementalDecoder:
    """Decoder that returns text as soon as it is final. The joined texts are the decoding of all ids."""

    def __init__(self, decode: Callable[[Sequence[int]], str], byte_ids: Container[int] = ()) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._run: list[int] = []
        self._window: list[int] = []
        self._given = 0
        self._is_cut = False

    @property
    def is_waiting(self) -> bool:
        """True if the ids so far end inside a character, or may."""
        return self._is_cut or bool(self._run)

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that became final with `ids`."""
        # With byte fallback a run of single bytes is one text, or none, so it waits for its end.
        ids = [*self._run, *ids]
        end = len(ids)
        while end and ids[end - 1] in self._byte_ids:
            end -= 1
        ids, self._run = ids[:end], ids[end:]
        if not ids:
            return ""
        # Decoding all ids each time takes quadratic time. Decoding each id alone breaks characters that span tokens.
        self._window.extend(ids)
        text = self._decode(self._window)
        # The bytes of an incomplete character at the end decode to one replacement character.
        end = max(self._given, len(text) - text.endswith(REPLACEMENT))
        new = text[self._given : end]
        self._given, self._is_cut = end, end < len(text)
        if len(self._window) >= _LONGEST_WINDOW:
            self._window = self._window[-_SHORTEST_WINDOW:]
            self._given = len(self._decode(self._window)) - (len(text) - end)
        return new

    def end(self) -> str:
        """Return the text that waited. Later ids are decoded on their own."""
        waiting = [*self._window, *self._run]
        text = self._decode(waiting)[self._given :] if waiting else ""
        self._window, self._run, self._given, self._is_cut = [], [], 0, False
        return text


class StopStrings:
    """Search for the token that completes a stop string."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str], byte_ids: Container[int] = ()
    ) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._decoder = IncrementalDecoder(decode, byte_ids)
        self._stop = tuple(stop)
        self._tail_length = max((len(text) for text in self._stop), default=0)
        self._tail = ""
        self._in_run: str | None = None
        """Tail as if the current run of bytes ended here. None outside a run."""
        self._character: list[int] = []
        """Bytes of the run that are no character yet, full once the run cannot be text."""

    def push(self, token_id: int) -> str | None:
        """Return the stop string that `token_id` completes, or None."""
        if not self._stop:
            return None
        final = self._decoder.push([token_id])
        if token_id in self._byte_ids:
            return self._push_byte(token_id)
        self._in_run, self._character = None, []
        self._tail, found = self._search(self._tail, final)
        return found

    def _push_byte(self, token_id: int) -> str | None:
        if len(self._character) < _LONGEST_CHARACTER:
            self._character.append(token_id)
        text = self._decode(self._character)
        if REPLACEMENT in text:
            return None
        self._character = []
        self._in_run, found = self._search(self._tail if self._in_run is None else self._in_run, text)
        return found

    def _search(self, before: str, new: str) -> tuple[str, str | None]:
        text = before + new
        places = {stop: text.find(stop, max(0, len(before) - len(stop) + 1)) for stop in self._stop}
        found = [stop for stop in self._stop if places[stop] >= 0]
        return text[-self._tail_length :], min(found, key=places.__getitem__) if found else None


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
