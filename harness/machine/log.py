"""What happens is logged by name and values, through `logging`, below the name `harness`.

A program that embeds the harness decides what becomes of it, as of every library's log: nothing is written anywhere
unless a handler listens. As text an event is one line, `turn_ended end=drained turn=3`; our own commands listen with
`harness.telemetry.logging`, which takes name and values apart. Values that are bound to the context are in every event.
"""

import logging
from collections.abc import Mapping
from typing import Any

import structlog
from structlog.typing import EventDict

ROOT = "harness"

logging.getLogger(ROOT).addHandler(logging.NullHandler())  # else `logging` itself prints warnings


class LoggedEvent:
    """The message of a record: `values` with the name under `event`; a text when somebody wants one."""

    __slots__ = ("values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __str__(self) -> str:
        others = dict(self.values)
        name, exception = others.pop("event"), others.pop("exception", None)
        text = " ".join([str(name), *(f"{key}={value!r}" for key, value in others.items())])
        return text if exception is None else f"{text}\n{exception}"


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger of events for the module `name`."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.processors.format_exc_info,
            _as_message,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    ).bind()
    return logger


def _as_message(_logger: object, _method: str, event: EventDict) -> tuple[tuple[LoggedEvent], dict[str, Any]]:
    return (LoggedEvent(event),), {}
