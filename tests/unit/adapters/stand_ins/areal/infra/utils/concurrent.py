"""Functions that are called when a loop ends."""

_cleanups = []


def register_loop_cleanup(callback, *, loop=None):
    """Have `callback` called then."""
    _cleanups.append(callback)


async def run_cleanups():
    """Call them, the last one first."""
    while _cleanups:
        await _cleanups.pop()()
