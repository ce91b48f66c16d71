"""Text that appears token by token, and the stop strings in it.

Decoding a growing list of ids from its start each time would cost quadratic time; decoding each id alone breaks
characters that span tokens. `IncrementalDecoder` decodes a short window: the ids whose text is not final yet, with a
few finished ids before them for context. Cost per token is constant.
"""

from collections.abc import Callable, Sequence

_CONTEXT_IDS = 4  # finished ids kept in the window; sub-word decoders look at their left neighbour only
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER_IDS = 4  # a UTF-8 character has at most 4 bytes, so at most 4 ids can be pending


class IncrementalDecoder:
    """Yields the text of a growing id sequence as soon as it is final."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._finished_ids = 0
        self._finished_text = ""

    def push(self, token_id: int) -> str:
        """The text that became final with `token_id`; empty while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = len(self._window) - self._finished_ids
        if text.endswith(_REPLACEMENT) and pending < _LONGEST_CHARACTER_IDS:
            return ""
        new = text[len(self._finished_text) :]
        self._window = self._window[-_CONTEXT_IDS:]
        self._finished_ids = len(self._window)
        self._finished_text = self._decode(self._window)
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
        text = self._tail + self._decoder.push(token_id)
        self._tail = text[-self._tail_length :]
        found = [stop for stop in self._stop if stop in text]
        return min(found, key=text.index) if found else None
