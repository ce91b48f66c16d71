"""Seeds that depend on a rollout's indices (step, prompt, sample, attempt), never on when it runs (I10)."""

from harness.sessions.seeds import seed_of


def derive_seed(base_seed: int, *path: int) -> int:
    """Return the seed of `path`, in `range(2**63)`. Different paths give unrelated seeds."""
    return seed_of("/".join(str(index) for index in (base_seed, *path)).encode())
