"""Sequences that try to mislead a repeat detector, and the definition it is held against.

Everything derives from a seeded generator, so a failure names a configuration and a sequence that can be replayed.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from server_patch.repeat_terminate import RepeatTerminateConfig, Rule


class Case(NamedTuple):
    """A configuration, and sequences of one length that probe its limits."""

    config: RepeatTerminateConfig
    key_ids: tuple[int, ...]
    sequences: list[list[int]]


class Trigger(NamedTuple):
    """Where a sequence is ended, and why."""

    index: int
    rule: Rule


def naive_trigger(config: RepeatTerminateConfig, key_ids: Sequence[int], tokens: Sequence[int]) -> Trigger | None:
    """The rules as they are written in the documentation, looked up afresh in every prefix."""
    for length in range(max(config.min_new_tokens, 1), len(tokens) + 1):
        rule = naive_rule(config, list(key_ids), list(tokens[:length]))
        if rule is not None:
            return Trigger(length - 1, rule)
    return None


def naive_rule(config: RepeatTerminateConfig, key: list[int], prefix: list[int]) -> Rule | None:
    if config.max_object_keys is not None:
        count = sum(prefix[i : i + len(key)] == key for i in range(len(prefix) - len(key) + 1))
        if count >= config.max_object_keys:
            return Rule.OBJECT_KEYS
    run = config.max_consecutive_token_repeats
    if run and prefix[-run:] == prefix[-1:] * run:
        return Rule.CONSECUTIVE
    size, repeats = config.ngram_size, config.ngram_repeats
    if size and repeats > 1 and len(prefix) >= size * repeats and prefix[-size * repeats :] == prefix[-size:] * repeats:
        return Rule.NGRAM
    return None


def case(random: Random, *, sequences: int, length: int) -> Case:
    """A random configuration, with as many sequences of each kind."""
    config = _config(random)
    key_ids = tuple(random.choices(range(3), k=random.randint(1, 4)))
    kinds = [_random, _periodic, _near_miss, _period_changes, _runs, _keys, _grams]
    made = [_cut(kinds[i % len(kinds)], random, config, key_ids, length) for i in range(sequences)]
    return Case(config, key_ids, made)


def _config(random: Random) -> RepeatTerminateConfig:
    return RepeatTerminateConfig(
        min_new_tokens=random.choice([0, 1, 5, 16, 24]),
        max_consecutive_token_repeats=random.choice([0, 0, 2, 3, 5, 8]),
        ngram_size=random.choice([0, 1, 2, 3, 4, 5, 6, 8, 12]),
        ngram_repeats=random.choice([0, 1, 2, 2, 2, 3, 4]),
        max_object_keys=random.choice([None, None, 1, 2, 5]),
    )


_Kind = Callable[[Random, RepeatTerminateConfig, Sequence[int]], list[int]]


def _cut(kind: _Kind, random: Random, config: RepeatTerminateConfig, key: Sequence[int], length: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += kind(random, config, key)
    return tokens[:length]


def _random(random: Random, _config: RepeatTerminateConfig, _key: Sequence[int]) -> list[int]:
    return random.choices(range(random.randint(1, 5)), k=random.randint(1, 48))


def _periodic(random: Random, config: RepeatTerminateConfig, _key: Sequence[int]) -> list[int]:
    """One period for long, a token of it wrong now and then."""
    gram = _gram(random, config)
    noise = random.choice([0, 0, 0.02, 0.1])
    return [random.randrange(4) if random.random() < noise else token for token in gram * 8]


def _near_miss(random: Random, config: RepeatTerminateConfig, _key: Sequence[int]) -> list[int]:
    """As many repetitions as needed, but for the last token, or for one in the middle."""
    gram = _gram(random, config)
    tokens = gram * max(config.ngram_repeats, 2)
    tokens[random.choice([-1, len(tokens) // 2, 0])] += 10
    return tokens


def _period_changes(random: Random, config: RepeatTerminateConfig, _key: Sequence[int]) -> list[int]:
    first, second = _gram(random, config), _gram(random, config)
    return first * random.randint(1, 3) + second * random.randint(1, 3)


def _runs(random: Random, config: RepeatTerminateConfig, _key: Sequence[int]) -> list[int]:
    """Runs one shorter, as long and one longer than the limit."""
    limit = config.max_consecutive_token_repeats or 4
    return [random.randrange(3)] * (limit + random.randint(-1, 1)) + [random.randrange(3, 6)] * random.randint(0, 1)


def _keys(random: Random, _config: RepeatTerminateConfig, key: Sequence[int]) -> list[int]:
    """The object key, whole, begun, overlapping itself, among other tokens."""
    return [*key[: random.randint(0, len(key))], *key, *random.choices(range(6), k=random.randint(0, 3))]


def _grams(random: Random, config: RepeatTerminateConfig, _key: Sequence[int]) -> list[int]:
    """An n-gram back to back, at every offset, with something between two series of it."""
    gram = _gram(random, config)
    repeats = max(config.ngram_repeats + random.randint(-1, 1), 1)
    return random.choices(range(8), k=random.randint(0, 5)) + gram * repeats + [99]


def _gram(random: Random, config: RepeatTerminateConfig) -> list[int]:
    """A gram of the size that counts, of a divisor or multiple of it, or of one next to it."""
    size = config.ngram_size or 3
    sizes = [size, size, size, size - 1, size + 1, size * 2, max(size // 2, 1)]
    return random.choices(range(random.randint(1, 6)), k=max(random.choice(sizes), 1))
