"""uv and pip. Building a package runs its code, so installers get no token of ours."""

import shutil
import sys
from contextlib import suppress
from importlib.util import find_spec

from harness.errors import HarnessError, LaneError
from harness.machine.program import Ended, run

_TAIL_LINES = 25


def find_uv() -> str:
    """Return uv's program: its package's, or the one on PATH. Raises `LaneError`."""
    if find_spec("uv") is not None:
        import uv

        with suppress(FileNotFoundError):  # a package without its program
            return uv.find_uv_bin()
    program = shutil.which("uv")
    if program is None:
        raise LaneError("expected uv, which builds environments, found none: pip install 'session-harness[run]'")
    return program


def pip_command() -> list[str]:
    """Return a pip command for this interpreter: its own, or uv's."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    return [find_uv(), "tool", "run", "--quiet", "--python", sys.executable, "pip"]


async def run_uv(*arguments: str, deadline_s: float | None, failure: type[HarnessError] = LaneError) -> str:
    """Return uv's output, stripped. Raises `failure`, or `LaneError` for a timeout."""
    return _require_success(arguments, await run(find_uv(), *arguments, deadline_s=deadline_s), failure)


async def try_uv(*arguments: str, deadline_s: float) -> Ended:
    return await run(find_uv(), *arguments, deadline_s=deadline_s)


def _require_success(arguments: tuple[str, ...], ended: Ended, failure: type[HarnessError]) -> str:
    if ended.code:
        tail = "\n".join(ended.messages.splitlines()[-_TAIL_LINES:])
        raise failure(
            f"`uv {' '.join(arguments)}` failed with exit code {ended.code}; mend what it names and try again:\n{tail}"
        )
    return ended.output.strip()
