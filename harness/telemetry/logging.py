"""Structured logs on standard error: readable on a terminal, JSON lines elsewhere."""

import logging
import select
import sys
from contextlib import suppress
from threading import Lock
from typing import TextIO

import structlog
from structlog.typing import EventDict

from harness.telemetry.printable import printable

_PIECE = 1_000  # characters: a pipe that has room takes 4,096 bytes, whatever they are
_READER_MS = 100


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
    """Writes lines as far as somebody takes them: a pipe that nobody reads or a full disk costs no turn.

    Every turn writes one from the event loop, and a write to a full pipe returns when somebody reads. So a line is
    written when there is room for it. A reader that makes none for a moment loses what comes until it does.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = Lock()  # records and the store have threads of their own
        self._is_read = True
        self._room: select.poll | None = select.poll()
        try:
            self._room.register(stream.fileno(), select.POLLOUT)
        except (AttributeError, OSError, ValueError):  # a stream in memory takes everything
            self._room = None

    def write(self, line: str) -> None:
        with self._lock, suppress(OSError, ValueError):  # the latter: it has been closed
            whole = line + "\n"
            for start in range(0, len(whole), _PIECE):
                if not self._has_room():
                    return
                self._stream.write(whole[start : start + _PIECE])
                self._stream.flush()

    debug = info = warning = error = critical = write

    def _has_room(self) -> bool:
        """Whether a piece can be written without waiting for a reader; one that was there is waited for a moment."""
        self._is_read = self._room is None or bool(self._room.poll(_READER_MS if self._is_read else 0))
        return self._is_read


def _printable_values(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Paths and messages hold what clients sent."""
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}
