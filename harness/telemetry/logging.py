"""Structured logs on standard error: readable on a terminal, JSON lines elsewhere."""

import logging
import sys

import structlog
from structlog.typing import EventDict

from harness.telemetry.printable import printable


def configure_logging(level: str = "info") -> None:
    """Set up structlog for this process; stdout stays free for results."""
    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _printable_values(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Paths and messages hold what clients sent."""
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}
