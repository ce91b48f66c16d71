"""The events that are logged in a block."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.machine.log import ROOT, LoggedEvent


class _Collector(logging.Handler):
    def __init__(self, events: list[dict[str, Any]]) -> None:
        super().__init__()
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        values = record.msg.values if isinstance(record.msg, LoggedEvent) else {"event": record.getMessage()}
        self._events.append({**values, "log_level": record.levelname.lower()})


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """Each event of every level by its values, those of its context included, with its `log_level`."""
    events: list[dict[str, Any]] = []
    logger, collector = logging.getLogger(ROOT), _Collector(events)
    level = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.DEBUG)
    try:
        yield events
    finally:
        logger.setLevel(level)
        logger.removeHandler(collector)
