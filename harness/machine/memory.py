"""Garbage collection of a process that has started."""

import ctypes
import gc

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
