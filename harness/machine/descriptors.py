"""The descriptors that this process may have open: one for each connection, whoever began it."""

import resource
from contextlib import suppress


def raise_descriptor_limit() -> None:
    """Let this process, and those that it starts, open as many as the system allows it; for programs of their own.

    Where the system names no bound and has one, nothing changes.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int | None:
    """How many this process may have open at one time; None where that is not bounded."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft in (resource.RLIM_INFINITY, -1) else soft
