"""Progress reports of fetching a model."""

from enum import StrEnum
from typing import Protocol


class FetchPhase(StrEnum):
    """Phases, in order."""

    WAIT = "wait"
    """Another process fetches the model."""
    VERIFY = "verify"
    DOWNLOAD = "download"
    EXTRACT = "extract"
    CONVERT = "convert"


class FetchProgress(Protocol):
    """Callback of the fetching thread: quick, and never raising."""

    def __call__(self, phase: FetchPhase, done: int, total: int) -> None:
        """Report `done` of `total` bytes; `total` is 0 if unknown."""


def silent(phase: FetchPhase, done: int, total: int) -> None:
    """Report nothing."""
