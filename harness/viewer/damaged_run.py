"""Damaged parts of a run become sentences; the rest is shown.

Files may be half written, of another version, or crafted: a time that is no number, a list in place of a message, JSON
nested thousands deep.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from harness.errors import HarnessError

DAMAGE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, OSError)


@contextmanager
def say_missing(what: str, missing: list[str]) -> Iterator[None]:
    """Turn an error of the block into a sentence about `what` in `missing`."""
    try:
        yield
    except HarnessError as error:
        missing.append(f"{what}: {error.message}")
    except DAMAGE as error:
        missing.append(f"{what}: it is damaged ({type(error).__name__}: {error})")


def require_finite(number: float) -> float:
    """Return `number` from a file. Raises `ValueError` or `TypeError` if it is not finite."""
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a time")
    return number
