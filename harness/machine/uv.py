"""uv and other installers.

Building a package runs its code, so installers get no token of ours. None outlives the process that waits for it.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import uv

from harness.errors import HarnessError, LaneError
from harness.machine.inherited_variables import for_installers
from harness.machine.watchdog import Watchdog

_TAIL_LINES = 25


class Ended(NamedTuple):
    code: int
    output: str
    messages: str


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
        raise _late(command, deadline_s) from None
    return _require_success(arguments, Ended(done.returncode, done.stdout, done.stderr), LaneError)


async def try_uv(*arguments: str, deadline_s: float) -> Ended:
    return await run(uv.find_uv_bin(), *arguments, deadline_s=deadline_s)


async def run(
    *command: str, deadline_s: float | None, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Ended:
    """Run an installer. `env` replaces its variables. Raises `LaneError` after `deadline_s`."""
    async with AsyncExitStack() as stack:
        watchdog = Watchdog()
        stack.push_async_callback(watchdog.close)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=for_installers(os.environ) if env is None else env,
            cwd=cwd,
            start_new_session=True,
        )
        watchdog.watch(process.pid)  # an orphaned installer would go on writing where the next one works
        try:
            async with asyncio.timeout(deadline_s):
                output, messages = await process.communicate()
        except TimeoutError:
            raise _late(command, deadline_s) from None
        finally:
            if process.returncode is None:  # leave nothing of it, its children included
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.communicate()
            watchdog.forget(process.pid)
    assert process.returncode is not None
    return Ended(process.returncode, output.decode(errors="replace"), messages.decode(errors="replace"))


def _require_success(arguments: tuple[str, ...], ended: Ended, failure: type[HarnessError]) -> str:
    if ended.code:
        tail = "\n".join(ended.messages.splitlines()[-_TAIL_LINES:])
        raise failure(
            f"`uv {' '.join(arguments)}` failed with exit code {ended.code}; mend what it names and try again:\n{tail}"
        )
    return ended.output.strip()


def _late(command: Sequence[str], deadline_s: float | None) -> LaneError:
    assert deadline_s is not None
    words = " ".join((Path(command[0]).name, *command[1:]))
    return LaneError(
        f"`{words}` did not end within {deadline_s:g} s; see that the package index answers, and try again"
    )
