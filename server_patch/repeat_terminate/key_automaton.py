"""Count occurrences of a token subsequence in a stream (Knuth-Morris-Pratt), overlapping ones too."""

from collections.abc import Sequence
from functools import lru_cache

Transitions = tuple[dict[int, int], ...]
"""Next state by token, per state; others lead to 0."""


@lru_cache(maxsize=64)
def key_transitions(key_ids: tuple[int, ...]) -> Transitions:
    """Build the automaton of `key_ids`; its last state marks an occurrence."""
    return tuple(_row(key_ids, state) for state in range(len(key_ids) + 1)) if key_ids else ()


def _row(key_ids: tuple[int, ...], state: int) -> dict[int, int]:
    seen = key_ids[:state]
    return {token: _longest_border(key_ids, (*seen, token)) for token in set(key_ids)}


def _longest_border(key_ids: tuple[int, ...], seen: Sequence[int]) -> int:
    longest = min(len(key_ids), len(seen))
    return next((n for n in range(longest, 0, -1) if tuple(seen[-n:]) == key_ids[:n]), 0)
