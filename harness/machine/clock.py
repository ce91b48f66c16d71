"""Clocks as parameters, so tests can skip hours. Durations use `steady_time`: a machine's clock may be set."""

import time
from typing import Protocol

_COUNTER = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Clock that counts during sleep, where available."""


class Clock(Protocol):
    def __call__(self) -> float: ...


def steady_time() -> float:
    """Return Unix time that setting the clock does not change."""
    return _ZERO + time.clock_gettime(_COUNTER)


def steady(clock: Clock) -> Clock:
    """Return the clock for durations; an injected one stays."""
    return steady_time if clock is time.time else clock


_ZERO = time.time() - time.clock_gettime(_COUNTER)
