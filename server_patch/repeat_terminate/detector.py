"""Decide, token by token, whether a generation repeats itself.

Sees the generated tokens of one sequence, never its prompt. One counter per rule is enough, so a token costs O(1) time
and a sequence O(`ngram_size`) memory: the last n tokens are one n-gram r times back to back exactly when x[t] == x[t-n]
has held for n*(r-1) tokens in a row. The engine ends the sequence; a token that it forces to do so must not be pushed.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from server_patch.repeat_terminate.config import OBJECT_KEY_TEXT, ConfigError, RepeatTerminateConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MANY = 256
"""Length from which counting at once is faster."""

Transitions = tuple[dict[int, int], ...]
"""Next state by token, per state; others lead to 0."""


class Rule(StrEnum):
    """Rule that ended a sequence, in order of precedence."""

    OBJECT_KEYS = "object_keys"
    """`max_object_keys` occurrences of the object key."""
    CONSECUTIVE = "consecutive"
    """The last `max_consecutive_token_repeats` tokens are identical."""
    NGRAM = "ngram"
    """The last `ngram_size` tokens, `ngram_repeats` times back to back."""


class RepeatDetector:
    """State of one sequence. Raises `ConfigError` if the tokens of `OBJECT_KEY_TEXT` are needed and missing."""

    __slots__ = (
        "_config",
        "_key_ids",
        "_key_state",
        "_last",
        "_matched",
        "_run",
        "_transitions",
        "_window",
        "keys",
        "length",
        "rule",
    )

    def __init__(self, config: RepeatTerminateConfig, object_key_ids: Sequence[int] | None = None) -> None:
        self._config = config
        self._window: list[int | None] = [None] * (config.ngram_size if config.ngram_matches else 0)
        self._matched = 0
        self._last: int | None = None
        self._run = 0
        self._key_ids = counted_key_ids(config, object_key_ids)
        self._transitions = key_transitions(self._key_ids)
        self._key_state = 0
        self.keys = 0
        """Occurrences of the object key, if counted."""
        self.length = 0
        """Tokens seen, up to the triggering one."""
        self.rule: Rule | None = None

    @property
    def triggered(self) -> bool:
        return self.rule is not None

    def push(self, token: int) -> bool:
        """Take a token. Return True from the triggering one on."""
        if self.rule is None:
            self._count_key(token)
            self._count_run(token)
            self._count_match(token)
            self.length += 1
            if self.length >= self._config.min_new_tokens:
                self.rule = self._first_rule()
        return self.rule is not None

    def push_all(self, tokens: Iterable[int]) -> int | None:
        """Take tokens until a rule triggers. Return the triggering index, or None."""
        sequence = tokens if isinstance(tokens, Sequence) else list(tokens)
        if len(sequence) >= _MANY and not self.length and self.rule is None:
            return self._push_many(sequence)
        return next((index for index, token in enumerate(sequence) if self.push(token)), None)

    def seed(self, tokens: Iterable[int]) -> None:
        """Count tokens from before a continuation."""
        self.push_all(tokens)

    def _push_many(self, tokens: Sequence[int]) -> int | None:
        config = self._config
        counted = _columns_of(tokens, len(self._window), self._key_ids)
        trips = counted.runs < 0  # none
        if config.max_object_keys is not None:
            trips |= counted.keys >= config.max_object_keys
        if config.max_consecutive_token_repeats > 0:
            trips |= counted.runs >= config.max_consecutive_token_repeats
        if config.ngram_matches > 0:
            trips |= counted.matches >= config.ngram_matches
        trips[: max(0, config.min_new_tokens - 1)] = False
        at = int(trips.argmax()) if trips.any() else None
        self.length = len(tokens) if at is None else at + 1
        last = self.length - 1
        self._run, self._matched, self.keys = (int(column[last]) for column in counted)
        self._last = tokens[last]
        for position in range(max(0, self.length - len(self._window)), self.length):
            self._window[position % len(self._window)] = tokens[position]
        for token in tokens[max(0, self.length - len(self._key_ids)) : self.length] if self._key_ids else ():
            self._key_state = self._transitions[self._key_state].get(token, 0)
        self.rule = None if at is None else self._first_rule()
        return at

    def _count_key(self, token: int) -> None:
        if self._transitions:
            self._key_state = self._transitions[self._key_state].get(token, 0)
            self.keys += self._key_state == len(self._transitions) - 1

    def _count_run(self, token: int) -> None:
        self._run = self._run + 1 if token == self._last else 1
        self._last = token

    def _count_match(self, token: int) -> None:
        if self._window:
            slot = self.length % len(self._window)
            self._matched = self._matched + 1 if self._window[slot] == token else 0
            self._window[slot] = token

    def _first_rule(self) -> Rule | None:
        config = self._config
        if config.max_object_keys is not None and self.keys >= config.max_object_keys:
            return Rule.OBJECT_KEYS
        if 0 < config.max_consecutive_token_repeats <= self._run:
            return Rule.CONSECUTIVE
        if 0 < config.ngram_matches <= self._matched:
            return Rule.NGRAM
        return None


def counted_key_ids(config: RepeatTerminateConfig, object_key_ids: Sequence[int] | None) -> tuple[int, ...]:
    """Return the tokens to count, () if the rule is off. Raises `ConfigError` if missing."""
    if config.max_object_keys is None:
        return ()
    if not object_key_ids:
        raise ConfigError(
            f"max_object_keys: expected the token ids of {OBJECT_KEY_TEXT!r} with it, got none;"
            " encode that text with the model's tokenizer, without special tokens"
        )
    return tuple(object_key_ids)


@lru_cache(maxsize=64)
def key_transitions(key_ids: tuple[int, ...]) -> Transitions:
    """Build the automaton that finds `key_ids` (Knuth-Morris-Pratt); its last state marks an occurrence."""
    return tuple(_row(key_ids, state) for state in range(len(key_ids) + 1)) if key_ids else ()


def _row(key_ids: tuple[int, ...], state: int) -> dict[int, int]:
    seen = key_ids[:state]
    return {token: _longest_border(key_ids, (*seen, token)) for token in set(key_ids)}


def _longest_border(key_ids: tuple[int, ...], seen: Sequence[int]) -> int:
    longest = min(len(key_ids), len(seen))
    return next((n for n in range(longest, 0, -1) if tuple(seen[-n:]) == key_ids[:n]), 0)


class _Columns(NamedTuple):
    """Element t is the counter after token t."""

    runs: "npt.NDArray[np.int64]"
    """Equal tokens in a row."""
    matches: "npt.NDArray[np.int64]"
    """Tokens in a row equal to the one `ngram_size` before."""
    keys: "npt.NDArray[np.int64]"
    """Occurrences of the object key so far."""


def _columns_of(tokens: Sequence[int], ngram_size: int, key_ids: Sequence[int]) -> _Columns:
    # All at once: Python would cost microseconds per token in the scheduler, for each sequence that continues after an
    # update. Disabled counters stay 0.
    import numpy as np  # every engine has it; short sequences do without

    ids = np.asarray(tokens, dtype=np.int64)
    is_repeated = np.zeros(ids.size, dtype=bool)
    is_repeated[1:] = ids[1:] == ids[:-1]
    is_match = np.zeros(ids.size, dtype=bool)
    if ngram_size:
        is_match[ngram_size:] = ids[ngram_size:] == ids[:-ngram_size]
    ends_key = np.zeros(ids.size, dtype=bool)
    if 0 < len(key_ids) <= ids.size:
        starts = ids.size - len(key_ids) + 1
        ends_key[len(key_ids) - 1 :] = np.logical_and.reduce(
            [ids[i : i + starts] == key_id for i, key_id in enumerate(key_ids)]
        )
    return _Columns(1 + _in_a_row(is_repeated), _in_a_row(is_match), np.cumsum(ends_key, dtype=np.int64))


def _in_a_row(holds: Any) -> Any:
    import numpy as np

    # Distance to the last element where `holds` is false.
    index = np.arange(holds.size, dtype=np.int64)
    return index - np.maximum.accumulate(np.where(holds, -1, index)) if holds.size else index
