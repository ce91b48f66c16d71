"""The memory of this process, once it has started: what it has made by then stays."""

import ctypes
import gc

_YOUNG_OBJECTS = 10_000
"""After so many the garbage collector looks: as many as some dozen turns leave behind, where Python's own 700 are less
than one turn has in use, all of which it then looks at for nothing."""


def settle() -> None:
    """Keep what there is: the garbage collector, stopped or not, runs from now on and never looks at that again.

    Memory that was freed on the way goes back to the system, where the C library is one that keeps it for later.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
    gc.enable()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)
