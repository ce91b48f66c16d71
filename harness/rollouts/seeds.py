"""Seeds that depend on where a rollout stands, never on when it runs (I10).

A seed is derived from the training seed and a path of indices (global step, prompt, sample, attempt ...). The same
path gives the same seed on every machine and in every version of Python; different paths give unrelated seeds.
"""

import hashlib

_SEED_BITS = 63  # fits a signed 64-bit integer, which is what engines and torch accept


def derive_seed(base_seed: int, *path: int) -> int:
    """The seed of `path` under `base_seed`, in `range(2**63)`."""
    name = "/".join(str(index) for index in (base_seed, *path))
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)
