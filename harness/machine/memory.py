"""The memory of this process, as far as the C library decides on it."""

import ctypes


def give_back_freed() -> None:
    """Hand memory that was freed back to the system, which the C library keeps for later; nothing where it cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)
