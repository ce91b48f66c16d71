"""Run a `check.py` on one session after another; a script, never imported.

    python -I check_runner.py CHECK

Standard library only, to start in milliseconds and hide the harness. Input lines are JSON objects with `id`, `session`,
`result` and `metadata`; output lines are `{"id": ..., "score": ...}` or `{"id": ..., "error": "..."}`. End of input
kills the process group.
"""

import contextlib
import dataclasses
import json
import os
import queue
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Mapping


def main(check: str) -> None:
    """Answer the lines of standard input."""
    # The check and its children must not read questions or write answers: they print to standard error.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # uvloop leaks more descriptors of the same pipes
    questions, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")  # children do not inherit these
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in questions:
            lines.put(line)
        os.killpg(0, signal.SIGKILL)  # the harness no longer waits for an answer

    threading.Thread(target=read, daemon=True).start()
    while True:
        request = json.loads(lines.get())
        with contextlib.redirect_stdout(sys.stderr):
            answer = score(check, request)
        answers.write(json.dumps({"id": request["id"], **answer}) + "\n")
        answers.flush()


def score(path: str, request: dict[str, object]) -> dict[str, object]:
    try:
        # Anew for each session, so that no global survives.
        check = runpy.run_path(path)
        value = as_json(check["score"](request["session"], request["result"], request["metadata"]))
        json.dumps(value)
    except KeyError as error:
        # Other arguments: a KeyError of the check itself.
        return {"error": describe(error) if error.args != ("score",) else "defines no function `score`"}
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any error of a check is its answer
        return {"error": describe(error)}
    return {"score": value}


def as_json(value: object) -> object:
    """Return `value`, as a dict if it is another mapping, a dataclass or a named tuple."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    fields = getattr(value, "_asdict", None)
    return value if fields is None else fields()


def describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


if __name__ == "__main__":
    main(sys.argv[1])
