"""An agent's result: a JSON object, nothing, or garbage.

Files (`HARNESS_RESULT_FILE`) and functions' values obey the same rules: UTF-8, strict JSON, an object, bounded size.
Reading a result never raises.
"""

import json
from pathlib import Path
from typing import NamedTuple

from harness.machine.disk import open_left_behind
from harness.types import Json, refuse_constant

MAX_RESULT_BYTES = 1 << 20


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
