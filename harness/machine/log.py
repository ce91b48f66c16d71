"""Structured events: structlog in front of `logging`, below the name `harness`.

The embedding program configures handlers. As text an event is one line, `turn_ended end=drained turn=3`.
`structlog.configure` is left to that program.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


@contextmanager
def _without(package: str) -> Iterator[None]:
    hidden = {} if package in sys.modules else {package: None}
    sys.modules.update(hidden)  # type: ignore[arg-type]  # None is what hides one
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


with _without("rich"):  # structlog.dev imports it for tracebacks: 100 modules, 5 MiB
    import structlog

ROOT = "harness"

logging.getLogger(ROOT).addHandler(logging.NullHandler())  # else `logging` itself prints warnings

_bound: ContextVar[Mapping[str, Any]] = ContextVar("harness_log_values")  # one value: structlog keeps one per key


class LoggedEvent:
    __slots__ = ("values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __str__(self) -> str:
        others = dict(self.values)
        name, exception = others.pop("event"), others.pop("exception", None)
        text = " ".join([str(name), *(f"{key}={value!r}" for key, value in others.items())])
        return text if exception is None else f"{text}\n{exception}"


def get_logger(name: str) -> "FilteringBoundLogger":
    """Return the logger of a module; its `debug` does nothing."""
    logger: FilteringBoundLogger = structlog.wrap_logger(
        logging.getLogger(name), _PROCESSORS, structlog.make_filtering_bound_logger(logging.INFO)
    ).bind()
    return logger


def bind(**values: Any) -> None:
    """Add `values` to every event of this context and later copies."""
    _bound.set({**_bound.get({}), **values})


@contextmanager
def bound(**values: Any) -> Iterator[None]:
    token = _bound.set({**_bound.get({}), **values})
    try:
        yield
    finally:
        _bound.reset(token)


def _to_record(logger: logging.Logger, method: str, event: MutableMapping[str, Any]) -> str:
    level: int = getattr(logging, method.upper())
    if logger.isEnabledFor(level):
        told = {**_bound.get({}), **event}
        if "exc_info" in told:
            told = dict(structlog.processors.format_exc_info(logger, method, told))
        # `logging`'s search for the caller would take half as long again.
        logger.handle(logger.makeRecord(logger.name, level, "", 0, LoggedEvent(told), (), None))
    raise structlog.DropEvent


_PROCESSORS = (_to_record,)
