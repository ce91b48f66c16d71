"""Descriptors and memory of this process."""

import ctypes
import gc
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


# Objects left by some dozen turns. Python's own 700 are fewer than one turn has in use, so each collection would be in
# vain.
_YOUNG_OBJECTS = 10_000


def settle() -> None:
    """Freeze existing objects, return freed memory, and start the garbage collector."""
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
    gc.enable()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)
