"""Text that appears token by token, and the stop strings in it.

Decoding a growing list of ids from its start each time would cost quadratic time; decoding each id alone breaks
characters that span tokens. `IncrementalDecoder` decodes a short window: the ids whose text is not final yet, with
some finished ids before them for context. Cost per token is constant.
"""

from collections.abc import Callable, Sequence

_LONGEST_WINDOW = 16  # ids; then it is cut back
_SHORTEST_WINDOW = 8  # ids: those of a character that is pending, and context; sub-word decoders look to their left
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDecoder:
    """Yields the text of a growing id sequence as soon as it is final.

    However the ids are cut, the texts put together are the decoding of all ids. Bytes at the end that are not a
    character yet decode to one replacement character, so that is all that waits.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that became final with `ids`; the beginning of an incomplete character waits."""
        if not ids:
            return ""
        self._window.extend(ids)
        text = self._decode(self._window)
        end = max(self._given, len(text) - text.endswith(_REPLACEMENT))
        new = text[self._given : end]
        self._given = end
        if len(self._window) >= _LONGEST_WINDOW:
            self._window = self._window[-_SHORTEST_WINDOW:]
            self._given = len(self._decode(self._window)) - (len(text) - end)
        return new

    def end(self) -> str:
        """The text that waited, as nothing follows it; what is pushed afterwards is decoded by itself."""
        text = self._decode(self._window)[self._given :] if self._window else ""
        self._window, self._given = [], 0
        return text


class StopStrings:
    """Tells at which token a generation completes one of its stop strings."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(decode)
        self._stop = tuple(stop)
        self._tail_length = max((len(text) for text in self._stop), default=0)
        self._tail = ""

    def push(self, token_id: int) -> str | None:
        """The stop string that the text contains since `token_id`, None while there is none."""
        if not self._stop:
            return None
        known = len(self._tail)
        text = self._tail + self._decoder.push([token_id])
        self._tail = text[-self._tail_length :]
        places = {stop: text.find(stop, max(0, known - len(stop) + 1)) for stop in self._stop}
        found = [stop for stop in self._stop if places[stop] >= 0]
        return min(found, key=places.__getitem__) if found else None
