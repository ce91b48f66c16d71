"""How many random examples a test tries: `make check` a fifth of what `make test` does."""

from hypothesis import settings

_EVERYTHING = 100  # of hypothesis's own default


def examples(full: int) -> int:
    """`full`, or its part under a profile with fewer examples; for tests that say a number of their own."""
    return full * settings().max_examples // _EVERYTHING
