"""The time of day as something that is handed in, so that hours pass in a test at once.

The clock of a machine may be set while a process lives. What lasts so and so long is therefore measured by
`steady_time`; what is written down, and compared with other machines, is the time of day.
"""

import time
from typing import Protocol

_COUNTER = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine sleeps, where there is such a one."""


class Clock(Protocol):
    """Unix time in seconds."""

    def __call__(self) -> float: ...


def steady_time() -> float:
    """Unix time as this process has counted it since its start: setting the clock of the machine does not move it."""
    return _ZERO + time.clock_gettime(_COUNTER)


def steady(clock: Clock) -> Clock:
    """The clock for what lasts so and so long, beside `clock`: one that was handed in for it is taken as it is."""
    return steady_time if clock is time.time else clock


_ZERO = time.time() - time.clock_gettime(_COUNTER)
