"""Counts occurrences of a token subsequence in a stream, one table look-up per token.

The states are how many tokens of the subsequence the stream currently ends with (Knuth, Morris and Pratt), so
overlapping occurrences count each. The tables are small: as many states as the subsequence has tokens, plus one.
"""

from collections.abc import Sequence
from functools import lru_cache

Transitions = tuple[dict[int, int], ...]
"""Per state, the next state for the tokens of the subsequence; any other token leads back to 0."""


@lru_cache(maxsize=64)
def key_transitions(key_ids: tuple[int, ...]) -> Transitions:
    """The automaton of `key_ids`; its last state is reached once per occurrence. Empty without ids."""
    return tuple(_row(key_ids, state) for state in range(len(key_ids) + 1)) if key_ids else ()


def _row(key_ids: tuple[int, ...], state: int) -> dict[int, int]:
    seen = key_ids[:state]
    return {token: _longest_border(key_ids, (*seen, token)) for token in set(key_ids)}


def _longest_border(key_ids: tuple[int, ...], seen: Sequence[int]) -> int:
    """How many tokens at the end of `seen` are the first ones of `key_ids`."""
    longest = min(len(key_ids), len(seen))
    return next((n for n in range(longest, 0, -1) if tuple(seen[-n:]) == key_ids[:n]), 0)
