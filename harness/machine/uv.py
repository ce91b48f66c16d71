"""Runs uv, which builds the engines' environments."""

import asyncio
import os
import signal
from contextlib import suppress

import uv

from harness.errors import LaneError

_TAIL_LINES = 25


async def run_uv(*arguments: str, deadline_s: float) -> str:
    """What uv said, on standard output and error; `LaneError` with the end of it when it failed."""
    code, said = await try_uv(*arguments, deadline_s=deadline_s)
    if code:
        tail = "\n".join(said.splitlines()[-_TAIL_LINES:])
        raise LaneError(
            f"`uv {' '.join(arguments)}` failed with exit code {code}; mend what it names and try again:\n{tail}"
        )
    return said


async def try_uv(*arguments: str, deadline_s: float) -> tuple[int, str]:
    """Exit code of uv and what it said."""
    return await run(uv.find_uv_bin(), *arguments, deadline_s=deadline_s)


async def run(*command: str, deadline_s: float) -> tuple[int, str]:
    """Exit code and output of a program that ends by itself, `LaneError` when it does not within `deadline_s`."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},  # ours is not the engine's
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(deadline_s):
            output, _ = await process.communicate()
    except TimeoutError:
        raise LaneError(f"`{' '.join(command)}` did not end within {deadline_s:g} s") from None
    finally:
        await _end(process)
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Nothing of the program is left, what it started included."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()
