"""Reduce concurrent failures to one error."""

from collections.abc import Iterator
from contextlib import contextmanager

from harness.errors import HarnessError


@contextmanager
def one_error() -> Iterator[None]:
    """Raise one error of a group: the first `HarnessError`, else the first."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group.subgroup(HarnessError) or group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group
