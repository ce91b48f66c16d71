"""Which of several servers has a session: its id says so, and its key.

Servers that share a public address are *shards*, numbered from 0. The first byte of a session's id, and of its key
behind the prefix, is the number of its shard. An id that its owner has chosen begins with any byte: the number is that
byte modulo the number of shards. So every id has one shard, and no table has to be kept or asked.
"""

from typing import NamedTuple

MOST_SHARDS = 256
"""One byte counts them."""

_DIGITS = 2


class ShardPlace(NamedTuple):
    """One shard among others."""

    number: int
    """From 0."""
    shards: int
    """How many there are."""

    def mark(self, digits: str) -> str:
        """The hex `digits` of an id or a key, which name this shard now."""
        return f"{self.number:02x}{digits[_DIGITS:]}"

    def has(self, digits: str) -> bool:
        """Whether an id or a key with these `digits` is one of this shard."""
        return find_shard(digits, self.shards) == self.number


def find_shard(digits: str, shards: int) -> int:
    """The number of the shard that has the id or the key with these `digits`; of what is none, that of the first."""
    try:
        return bytes.fromhex(digits[:_DIGITS])[0] % shards
    except (ValueError, IndexError):
        return 0
