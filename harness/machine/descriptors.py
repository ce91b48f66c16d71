"""Limits on this process's open descriptors."""

import resource
from contextlib import suppress


def raise_descriptor_limit() -> None:
    """Raise the limit to the system's. For programs, not libraries."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft in (resource.RLIM_INFINITY, -1) else soft
