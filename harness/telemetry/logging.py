"""Structured logs on standard error: readable on a terminal, JSON lines elsewhere."""

import logging
import sys
from contextlib import suppress
from typing import TextIO

import structlog
from structlog.typing import EventDict

from harness.telemetry.printable import printable


def configure_logging(level: str = "info") -> None:
    """Set up structlog for this process; stdout stays free for results."""
    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    lines = _Lines(sys.stderr)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _printable_values,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_names: lines,
    )


class _Lines:
    """Writes lines as far as somebody takes them: a pipe that nobody reads or a full disk costs no turn."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # the latter: it has been closed
            self._stream.write(line + "\n")
            self._stream.flush()

    debug = info = warning = error = critical = write


def _printable_values(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Paths and messages hold what clients sent."""
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}
