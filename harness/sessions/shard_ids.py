"""Shard numbers in session ids and keys, so that no table is needed.

*Shards* are servers behind one address. The first byte of an id, and of a key after its prefix, is the shard.
"""

from typing import NamedTuple

MOST_SHARDS = 256

_DIGITS = 2


class ShardPlace(NamedTuple):
    """One shard among others."""

    number: int
    shards: int

    def mark(self, digits: str) -> str:
        """Return hex `digits` that name this shard."""
        return f"{self.number:02x}{digits[_DIGITS:]}"

    def has(self, digits: str) -> bool:
        return find_shard(digits, self.shards) == self.number


def find_shard(digits: str, shards: int) -> int:
    """Return the shard of hex `digits`; 0 for other text."""
    try:
        # An id chosen by an owner begins with any byte, so take the modulo.
        return bytes.fromhex(digits[:_DIGITS])[0] % shards
    except (ValueError, IndexError):
        return 0
