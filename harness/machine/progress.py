"""How fetching a model reports where it is; drawing it is the caller's business."""

from enum import StrEnum
from typing import Protocol


class FetchPhase(StrEnum):
    """The work that is being done, in the order in which it happens."""

    WAIT = "wait"
    """Another process is fetching the same model."""
    VERIFY = "verify"
    """Comparing the files in the cache with their checksums."""
    DOWNLOAD = "download"
    EXTRACT = "extract"
    CONVERT = "convert"


class FetchProgress(Protocol):
    """Called from the thread that fetches, often; must return quickly and must not raise."""

    def __call__(self, phase: FetchPhase, done: int, total: int) -> None:
        """`done` of `total` bytes of `phase` are behind us; `total` is 0 where no amount is known."""


def silent(phase: FetchPhase, done: int, total: int) -> None:
    """A `FetchProgress` that nobody watches."""
