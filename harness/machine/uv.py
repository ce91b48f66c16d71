"""uv and pip. Building a package runs its code, so installers get no token of ours."""

import os
import subprocess
import sys
from importlib.util import find_spec

import uv

from harness.errors import HarnessError, LaneError
from harness.machine.inherited_variables import for_installers
from harness.machine.program import Ended, late_error, run

_TAIL_LINES = 25


def pip_command() -> list[str]:
    """Return a pip command for this interpreter: its own, or uv's."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    return [uv.find_uv_bin(), "tool", "run", "--quiet", "--python", sys.executable, "pip"]


async def run_uv(*arguments: str, deadline_s: float | None, failure: type[HarnessError] = LaneError) -> str:
    """Return uv's output, stripped. Raises `failure`, or `LaneError` for a timeout."""
    return _require_success(arguments, await run(uv.find_uv_bin(), *arguments, deadline_s=deadline_s), failure)


def run_uv_blocking(*arguments: str, deadline_s: float) -> str:
    """Do as `run_uv`, without a loop."""
    command = [uv.find_uv_bin(), *arguments]
    environment = for_installers(os.environ)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise late_error(command, deadline_s) from None
    return _require_success(arguments, Ended(done.returncode, done.stdout, done.stderr), LaneError)


async def try_uv(*arguments: str, deadline_s: float) -> Ended:
    return await run(uv.find_uv_bin(), *arguments, deadline_s=deadline_s)


def _require_success(arguments: tuple[str, ...], ended: Ended, failure: type[HarnessError]) -> str:
    if ended.code:
        tail = "\n".join(ended.messages.splitlines()[-_TAIL_LINES:])
        raise failure(
            f"`uv {' '.join(arguments)}` failed with exit code {ended.code}; mend what it names and try again:\n{tail}"
        )
    return ended.output.strip()
