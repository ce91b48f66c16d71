"""What happens is logged by name and values, through `logging`, below the name `harness`.

A program that embeds the harness decides what becomes of it, as of every library's log: nothing is written anywhere
unless a handler listens. As text an event is one line, `turn_ended end=drained turn=3`; our own commands listen with
`harness.telemetry.logging`, which takes name and values apart. Values that are bound to the context are in every event.
"""

import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

ROOT = "harness"

logging.getLogger(ROOT).addHandler(logging.NullHandler())  # else `logging` itself prints warnings

_bound: ContextVar[Mapping[str, Any]] = ContextVar("harness_log_values")
_CALLER = 3  # frames from where `logging` looks: a record names whoever logs, and not this module


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


class EventLogger:
    """Logs events under one name. An `exc_info`, an exception or true for the one at hand, is told as `exception`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **values: Any) -> None:
        """Log for whoever looks for a fault."""
        self._log(logging.DEBUG, event, values)

    def info(self, event: str, **values: Any) -> None:
        """Log what goes as it should."""
        self._log(logging.INFO, event, values)

    def warning(self, event: str, **values: Any) -> None:
        """Log what an operator may want to do something about."""
        self._log(logging.WARNING, event, values)

    def error(self, event: str, **values: Any) -> None:
        """Log what has failed."""
        self._log(logging.ERROR, event, values)

    def exception(self, event: str, **values: Any) -> None:
        """Log what has failed, with the exception at hand."""
        self._log(logging.ERROR, event, {"exc_info": True, **values})

    def critical(self, event: str, **values: Any) -> None:
        """Log what nothing works without."""
        self._log(logging.CRITICAL, event, values)

    def _log(self, level: int, event: str, values: dict[str, Any]) -> None:
        if not self._logger.isEnabledFor(level):
            return
        told = {**_bound.get({}), **values, "event": event}
        asked = told.pop("exc_info", None)
        error = asked if isinstance(asked, BaseException) else sys.exc_info()[1] if asked else None
        if error is not None:
            told["exception"] = "".join(traceback.format_exception(error)).rstrip("\n")
        self._logger.log(level, LoggedEvent(told), stacklevel=_CALLER)


def get_logger(name: str) -> EventLogger:
    """A logger of events for the module `name`."""
    return EventLogger(name)


def bind(**values: Any) -> None:
    """Have `values` in every event of this context, and of those that are copied from it from now on."""
    _bound.set({**_bound.get({}), **values})


@contextmanager
def bound(**values: Any) -> Iterator[None]:
    """Have `values` in every event of the block."""
    token = _bound.set({**_bound.get({}), **values})
    try:
        yield
    finally:
        _bound.reset(token)
