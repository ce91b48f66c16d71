"""The log of our commands on standard error, text or JSON lines. Embedders configure `harness.machine.log`."""

import json
import logging
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TextIO

from harness.machine.log import ROOT, LoggedEvent
from harness.server.telemetry.printable import printable

_TURN_ENDED = "turn_ended"
_PLAIN, _BOLD = 0, 1
_COLORS = {"debug": 2, "info": 32, "warning": 33, "error": 31, "critical": 31}  # of ANSI terminals
_OF_MORE = frozenset(" ='\"")
_PIECE = 1_000  # characters: a pipe that has room takes any 4,096 bytes
_READER_MS = 100
_OF_EVERY_RECORD = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})


def configure_logging(level: str = "info") -> None:
    """Log the harness from `level` on to standard error."""
    logger = logging.getLogger(ROOT)
    for before in logger.handlers[:]:
        logger.removeHandler(before)
    lines = _Lines(sys.stderr)
    lines.setFormatter(_EventFormatter(_render_line if sys.stderr.isatty() else json.JSONEncoder(default=repr).encode))
    logger.addHandler(lines)
    logger.propagate = False
    logger.setLevel(level.upper())


def current_level() -> str:
    """Return the level set by `configure_logging`."""
    return logging.getLevelName(logging.getLogger(ROOT).level).lower()


class _EventFormatter(logging.Formatter):
    def __init__(self, render: Callable[[dict[str, Any]], str]) -> None:
        super().__init__()
        self._render = render

    def format(self, record: logging.LogRecord) -> str:
        # `server_patch` logs messages with `extra`, not events.
        if isinstance(record.msg, LoggedEvent):
            event = dict(record.msg.values)
        else:
            extra = {key: each for key, each in vars(record).items() if key not in _OF_EVERY_RECORD}
            event = {"event": record.getMessage(), "logger": record.name, **extra}
            if record.exc_info:
                event["exception"] = self.formatException(record.exc_info)
        moment = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
        event |= {"level": record.levelname.lower(), "timestamp": moment}
        # Paths and messages hold text that clients sent.
        return self._render({key: printable(each) if isinstance(each, str) else each for key, each in event.items()})


def _render_line(event: dict[str, Any]) -> str:
    if event["event"] == _TURN_ENDED:
        return _render_turn(event)
    level, exception = event.pop("level"), event.pop("exception", None)
    head = [event.pop("timestamp"), _color(f"{level:8}", _COLORS.get(level, _PLAIN)), _color(event.pop("event"), _BOLD)]
    values = (f"{key}={each if _is_word(each) else repr(each)}" for key, each in event.items())
    line = " ".join([*head, *values])
    return line if exception is None else f"{line}\n{exception}"


def _render_turn(event: dict[str, Any]) -> str:
    seconds = sum(each for key, each in event.items() if key.endswith("_s"))
    error = f"; {event['code']}: {event['error']}" if "error" in event else ""
    return (
        f"{event['timestamp'][11:19]} {_color(str(event.get('session_id', '-'))[:8], _BOLD)} turn {event.get('turn')}:"
        f" {event.get('status')} by {event.get('end')}, {event.get('tokens')} tokens in {seconds:.2f} s{error}"
    )


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and _OF_MORE.isdisjoint(value) and bool(value)


def _color(text: object, code: int) -> str:
    return str(text) if "NO_COLOR" in os.environ else f"\x1b[{code}m{text}\x1b[0m"


class _Lines(logging.Handler):
    """Handler that never blocks: an unread pipe or a full disk delays no turn.

    The event loop writes a line per turn. A reader that makes no room for a moment loses lines until it does.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._is_read = True
        self._room: select.poll | None = select.poll()
        try:
            self._room.register(stream.fileno(), select.POLLOUT)
        except (AttributeError, OSError, ValueError):  # a stream in memory takes everything
            self._room = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; `logging` serializes calls."""
        with suppress(OSError, ValueError):  # the latter: the stream has been closed
            whole = self.format(record) + "\n"
            for start in range(0, len(whole), _PIECE):
                if not self._has_room():
                    return
                self._stream.write(whole[start : start + _PIECE])
                self._stream.flush()

    def _has_room(self) -> bool:
        # Wait a moment for an active reader, not at all for one that has stalled.
        self._is_read = self._room is None or bool(self._room.poll(_READER_MS if self._is_read else 0))
        return self._is_read
