"""Limits on this process's open descriptors: one for each connection."""

import resource
from contextlib import suppress


def raise_descriptor_limit() -> None:
    """Raise the limit of this process and its children to the system's, if it allows. For programs only."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int | None:
    """Return the limit, or None if unbounded."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft in (resource.RLIM_INFINITY, -1) else soft
