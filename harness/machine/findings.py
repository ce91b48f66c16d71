"""Findings of `harness doctor`, about an installation, an engine server or an agent."""

from enum import StrEnum
from typing import NamedTuple


class Level(StrEnum):
    OK = "ok"
    """Correct, or absent and not needed."""
    UNKNOWN = "unknown"
    """Not verifiable, with the reason."""
    WARN = "warn"
    """Part of the harness will not work here, or not as expected."""
    FAIL = "fail"
    """Needed: without it hardly anything works."""


class Finding(NamedTuple):
    check: str
    level: Level
    found: str
    """Observation, or the reason for none."""
    next_step: str = ""
