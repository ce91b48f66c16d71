"""Text that appears token by token, and the stop strings in it.

Decoding a growing list of ids from its start each time would cost quadratic time; decoding each id alone breaks
characters that span tokens. `IncrementalDecoder` decodes a short window: the ids whose text is not final yet, with
some finished ids before them for context. Cost per token is constant.
"""

from collections.abc import Callable, Sequence

_LONGEST_WINDOW = 16  # ids; then it is cut back
_SHORTEST_WINDOW = 8  # ids: up to 4 whose text is pending, and context; sub-word decoders look at their left neighbor
_LONGEST_WAIT = 4  # a UTF-8 character has at most 4 bytes: after as many ids without one, these bytes are no text
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDecoder:
    """Yields the text of a growing id sequence as soon as it is final."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0
        self._waited = 0

    def push(self, token_id: int) -> str:
        """The text that became final with `token_id`; the beginning of an incomplete character waits."""
        self._window.append(token_id)
        text = self._decode(self._window)
        end = len(text.rstrip(_REPLACEMENT))
        self._waited = self._waited + 1 if end <= self._given and end < len(text) else 0
        if self._waited < _LONGEST_WAIT:
            end = max(end, self._given)
        else:  # these bytes are no text: they are final as they are
            self._waited, end = 0, len(text)
        new = text[self._given : end]
        self._given = end
        if len(self._window) == _LONGEST_WINDOW:
            self._window = self._window[-_SHORTEST_WINDOW:]
            self._given = len(self._decode(self._window)) - (len(text) - end)
        return new


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
        text = self._tail + self._decoder.push(token_id)
        self._tail = text[-self._tail_length :]
        places = {stop: text.find(stop, max(0, known - len(stop) + 1)) for stop in self._stop}
        found = [stop for stop in self._stop if places[stop] >= 0]
        return min(found, key=places.__getitem__) if found else None
