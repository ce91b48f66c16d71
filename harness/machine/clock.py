"""Clocks as parameters, so that hours pass at once in a test.

A machine's clock may be set while a process lives. So durations use `steady_time`, and timestamps the time of day.
"""

import time
from typing import Protocol

_COUNTER = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Counts while the machine sleeps, where available."""


class Clock(Protocol):
    """Unix time in seconds."""

    def __call__(self) -> float: ...


def steady_time() -> float:
    """Return Unix time, unaffected by setting the machine's clock."""
    return _ZERO + time.clock_gettime(_COUNTER)


def steady(clock: Clock) -> Clock:
    """Return the clock for durations: `clock` itself if it was injected."""
    return steady_time if clock is time.time else clock


_ZERO = time.time() - time.clock_gettime(_COUNTER)
