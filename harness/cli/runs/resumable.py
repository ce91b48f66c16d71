"""A run that says how to resume it if it stops early."""

import shlex
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from harness.cli import output
from harness.errors import HarnessError
from harness.suite.exits import ExitCode, exit_code_of


class _Report(Protocol):
    @property
    def is_complete(self) -> bool: ...


_R = TypeVar("_R", bound=_Report)


def run_resumably(execute: Coroutine[Any, Any, _R], command: str, directory: Path, *options: str) -> _R:
    """Run to the report. If it stops early, print the `harness` command that resumes it in `directory`."""
    import uvloop

    resume = f"resume with: harness {shlex.join([command, str(directory), *options])} --resume"
    try:
        report = uvloop.run(execute)
    except HarnessError as error:
        if exit_code_of(error) is not ExitCode.USAGE:  # the same command would fail in the same way
            output.say(resume)
        raise
    if not report.is_complete:
        output.say(resume)
    return report
