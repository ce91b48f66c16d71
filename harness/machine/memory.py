"""The memory of this process, once it has started: what it has made by then stays."""

import ctypes
import gc


def settle() -> None:
    """Keep what there is: the garbage collector, stopped or not, runs from now on and never looks at that again.

    Memory that was freed on the way goes back to the system, where the C library is one that keeps it for later.
    """
    gc.freeze()
    gc.enable()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)
