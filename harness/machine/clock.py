"""The time of day as something that is handed in, so that hours pass in a test at once."""

from typing import Protocol


class Clock(Protocol):
    """Unix time in seconds."""

    def __call__(self) -> float: ...
