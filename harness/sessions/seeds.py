"""Seeds derived from content, never from time (I10): equal on every machine and Python version."""

from hashlib import blake2b

_SEED_BITS = 63  # fits a signed 64-bit integer, which is what engines and torch accept


def seed_of(text: bytes) -> int:
    """Return the seed of `text`, in `range(2**63)`."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> (64 - _SEED_BITS)
