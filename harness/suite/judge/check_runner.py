"""Runs a `check.py` on one session after the other, in a process of its own; started as a script, never imported.

    python -I check_runner.py CHECK

Standard library only, so that it starts in milliseconds and a check sees nothing of the harness. A line of standard
input is a JSON object with `id`, `session`, `result` and `metadata`; each is answered by one line on standard output,
`{"id": ..., "score": ...}` or `{"id": ..., "error": "..."}`. `CHECK` is run anew for each session, so that nothing in
its globals outlives one. A check and its children have neither of the two: they read nothing, and print to standard
error. The end of the input ends the whole process group, in the middle of a check too.
"""

import contextlib
import json
import os
import queue
import runpy
import signal
import sys
import threading
import traceback


def main(check: str) -> None:
    """Answer the lines of standard input."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # uvloop hands down further descriptors of the same pipes
    questions, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")  # which no child inherits
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in questions:
            lines.put(line)
        os.killpg(0, signal.SIGKILL)  # nobody waits for an answer any more

    threading.Thread(target=read, daemon=True).start()
    while True:
        request = json.loads(lines.get())
        with contextlib.redirect_stdout(sys.stderr):
            answer = score(check, request)
        answers.write(json.dumps({"id": request["id"], **answer}) + "\n")
        answers.flush()


def score(path: str, request: dict[str, object]) -> dict[str, object]:
    """The score of the check, or the error that it made."""
    try:
        check = runpy.run_path(path)
        value = check["score"](request["session"], request["result"], request["metadata"])
        json.dumps(value)
    except KeyError as error:
        return {"error": describe(error) if error.args != ("score",) else "defines no function `score`"}
    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a check raises is its answer
        return {"error": describe(error)}
    return {"score": value}


def describe(error: BaseException) -> str:
    """The error and the line of the check that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


if __name__ == "__main__":
    main(sys.argv[1])
