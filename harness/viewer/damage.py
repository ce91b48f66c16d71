"""What is missing, or says something else than its writer would have said, is a sentence; the rest is shown.

Files of a run may be half written, of another version, or by somebody who wants to see what happens: a number that is
no time, a list where a message belongs, JSON nested thousands deep. What such a part raises ends with the part.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from harness.errors import HarnessError

DAMAGE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, OSError)
"""Raised of what is damaged."""


@contextmanager
def say_missing(what: str, missing: list[str]) -> Iterator[None]:
    """What the block raises of a damaged file becomes a sentence about `what` in `missing`."""
    try:
        yield
    except HarnessError as error:
        missing.append(f"{what}: {error.message}")
    except DAMAGE as error:
        missing.append(f"{what}: it is damaged ({type(error).__name__}: {error})")


def require_finite(number: float) -> float:
    """`number`, which a file has said. Raises `ValueError` or `TypeError` when it is none that one can count with."""
    if not math.isfinite(number):
        raise ValueError(f"{number} is no time")
    return number
