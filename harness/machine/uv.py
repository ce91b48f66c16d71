"""Runs uv, which builds the environments of agents, engines and gateways, and other installers.

Building a package runs its code, so uv gets the part of our environment that installers need, and no token of ours.
No installer outlives the process that waits for it.
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
    """A program that has ended."""

    code: int
    output: str
    """Its standard output."""
    messages: str
    """Its standard error."""


def pip_command() -> list[str]:
    """The beginning of a command of pip, for this interpreter: its own, or uv's where there is none (uv makes such)."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    return [uv.find_uv_bin(), "tool", "run", "--quiet", "--python", sys.executable, "pip"]


async def run_uv(*arguments: str, deadline_s: float | None, failure: type[HarnessError] = LaneError) -> str:
    """The output of uv, stripped; raises `failure` with the end of its messages, and when it takes too long.

    A `deadline_s` of None leaves the bound to the caller.
    """
    return _require_success(arguments, await run(uv.find_uv_bin(), *arguments, deadline_s=deadline_s), failure)


def run_uv_blocking(*arguments: str, deadline_s: float) -> str:
    """Like `run_uv`, for those who have no event loop."""
    command = [uv.find_uv_bin(), *arguments]
    environment = for_installers(os.environ)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise _late(command, deadline_s) from None
    return _require_success(arguments, Ended(done.returncode, done.stdout, done.stderr), LaneError)


async def try_uv(*arguments: str, deadline_s: float) -> Ended:
    """How uv ended."""
    return await run(uv.find_uv_bin(), *arguments, deadline_s=deadline_s)


async def run(
    *command: str, deadline_s: float | None, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Ended:
    """How an installer ended, `LaneError` when it does not within `deadline_s`; `env` in the place of its variables."""
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
        watchdog.watch(process.pid)  # an installer that nobody waits for goes on writing where the next one works
        try:
            async with asyncio.timeout(deadline_s):
                output, messages = await process.communicate()
        except TimeoutError:
            raise _late(command, deadline_s) from None
        finally:
            if process.returncode is None:  # nothing of it is left, what it started included
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
