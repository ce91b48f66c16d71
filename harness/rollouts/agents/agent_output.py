"""An agent's output: `agent.log`, bounded on disk and in memory, and its result: a JSON object, nothing, or garbage.

Files (`HARNESS_RESULT_FILE`) and functions' values obey the same rules: UTF-8, strict JSON, an object, bounded size.
Reading a result never raises.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

from harness.machine.disk import open_left_behind
from harness.machine.log import get_logger
from harness.types import Json, refuse_constant

AGENT_LOG_FAILED = "agent_log_failed"

HEAD_BYTES = 1 << 20
TAIL_BYTES = 1 << 18
MAX_RESULT_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16

_log = get_logger(__name__)


class AgentLog:
    """Bounded log of one agent, as a context manager."""

    def __init__(
        self,
        path: Path,
        on_output: Callable[[bytes], None] | None = None,
        *,
        head_bytes: int = HEAD_BYTES,
        tail_bytes: int = TAIL_BYTES,
    ) -> None:
        self._path = path
        self._on_output = on_output
        self._file = path.open("wb", buffering=0)
        self._head_room = head_bytes
        self._tail_bytes = tail_bytes
        self._tail = bytearray()
        self._overflow = 0
        self._is_writable = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: bytes) -> None:
        """Append `data`, or count it if the log is full."""
        head = data[: self._head_room]
        self._head_room -= len(head)
        self._append(head)
        # Beyond the head, only the last bytes are kept. `close` appends them after the number of missing bytes.
        tail = data[len(head) :]
        self._overflow += len(tail)
        self._tail += tail
        del self._tail[: -self._tail_bytes]
        self._tell(data)

    def _tell(self, data: bytes) -> None:
        if self._on_output is not None:
            try:
                self._on_output(data)
            except Exception as error:  # noqa: BLE001  # the receiver's fault must not end the agent
                _log.warning("output_not_shown", error=str(error))
                self._on_output = None

    def close(self) -> None:
        """Append the kept tail and close the file. Idempotent."""
        if self._file.closed:
            return
        missing = self._overflow - len(self._tail)
        if missing:
            self._append(f"\n[... {missing} bytes left out ...]\n".encode())
        self._append(self._tail)
        self._file.close()

    def _append(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        try:
            while view and self._is_writable:
                view = view[self._file.write(view) :]
        except OSError as error:
            # A full disk must not disturb the agent: stop writing and warn once.
            self._is_writable = False
            _log.warning(AGENT_LOG_FAILED, path=str(self._path), error=error.strerror)


def read_last_lines(path: Path, most: int) -> list[str] | None:
    """Return the last lines of an agent's file that are not blank; None without a readable file."""
    try:
        lines = read_tail(path).splitlines()
    except OSError:
        return None
    return [line.strip() for line in lines if line.strip()][-most:]


def read_tail(path: Path) -> str:
    """Return the end of an agent's file. Raises `OSError`, also if the agent put something else there."""
    with open_left_behind(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read(_TAIL_BYTES).decode("utf-8", "replace")


class AgentResult(NamedTuple):
    value: Json | None = None
    garbage: str = ""
    """Reason why it is no object, if there is one."""


def read_result(path: Path) -> AgentResult:
    """Read a result without following links or waiting for a writer."""
    try:
        with open_left_behind(path) as file:
            data = file.read(MAX_RESULT_BYTES + 1)
    except FileNotFoundError:
        return AgentResult()
    except OSError as error:
        return AgentResult(garbage=f"not readable: {error.strerror}")
    return parse_result(data)


def parse_result(data: bytes) -> AgentResult:
    if len(data) > MAX_RESULT_BYTES:
        return AgentResult(garbage=f"larger than {MAX_RESULT_BYTES} bytes")
    try:
        value = json.loads(data.decode(), parse_constant=refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair, written as an escape, is no text
    except (UnicodeDecodeError, UnicodeEncodeError):
        return AgentResult(garbage="not UTF-8")
    except (ValueError, RecursionError) as error:
        return AgentResult(garbage=f"not JSON: {error}")
    if not isinstance(value, dict):
        return AgentResult(garbage=f"a JSON {type(value).__name__} instead of an object")
    return AgentResult(value)


def result_of_value(value: object) -> AgentResult:
    """Return the result of a function agent, checked like a file."""
    if value is None:
        return AgentResult()
    try:
        data = json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return AgentResult(garbage=f"not JSON: {error}")
    return parse_result(data)
