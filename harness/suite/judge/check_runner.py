"""Runs one `check.py` on one session, in a process of its own; started as a script, never imported.

Standard library only, so that it starts in milliseconds and a check sees nothing of the harness. Input: a JSON object
on standard input with `check` (a path), `session`, `result` and `metadata`. Output: a JSON object on standard output,
`{"score": ...}` or `{"error": "..."}`. The prints of the check go to standard error.
"""

import contextlib
import json
import runpy
import sys
import traceback


def main() -> None:
    """Score the session on standard input."""
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        answer = score(request)
    json.dump(answer, sys.stdout)


def score(request: dict[str, object]) -> dict[str, object]:
    """The score of the check, or the error that it made."""
    try:
        check = runpy.run_path(str(request["check"]))
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
    main()
