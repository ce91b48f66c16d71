"""Seeds that depend on where a rollout stands, never on when it runs (I10).

A seed is derived from the training seed and a path of indices (global step, prompt, sample, attempt ...).
"""

from harness.sessions.seeds import seed_of


def derive_seed(base_seed: int, *path: int) -> int:
    """The seed of `path` under `base_seed`, in `range(2**63)`; different paths give unrelated seeds."""
    return seed_of("/".join(str(index) for index in (base_seed, *path)).encode())
