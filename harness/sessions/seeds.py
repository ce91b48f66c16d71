"""Seeds from what is asked, never from when it is asked (I10): one hash for turns, segments and rollouts.

The same text gives the same seed on every machine and in every version of Python; different texts give unrelated seeds.
"""

from hashlib import blake2b

_SEED_BITS = 63  # fits a signed 64-bit integer, which is what engines and torch accept


def seed_of(text: bytes) -> int:
    """The seed that belongs to `text`, in `range(2**63)`."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> (64 - _SEED_BITS)
