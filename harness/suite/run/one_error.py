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
        errors = list(_leaves(group))
        raise next((error for error in errors if isinstance(error, HarnessError)), errors[0]) from group


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
