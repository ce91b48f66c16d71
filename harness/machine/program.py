"""Programs run to their end, such as installers. None outlives the process that waits for it."""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

from harness.errors import LaneError
from harness.machine.deadlines import to_the_end, within
from harness.machine.group_reaper import signal_group
from harness.machine.inherited_variables import for_installers
from harness.machine.process_group import reap
from harness.machine.watchdog import Watchdog

_GRACE_S = 2.0


class Ended(NamedTuple):
    code: int
    output: str
    messages: str


async def run(
    *command: str,
    deadline_s: float | None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ends_children: bool = False,
) -> Ended:
    """Run a program. `env` replaces the variables of an installer. Raises `LaneError` after `deadline_s`.

    `ends_children` kills what is left of its process group after success, too.
    """
    async with AsyncExitStack() as stack:
        watchdog = Watchdog()
        stack.push_async_callback(watchdog.close)
        # No pipes, which end with their last holder: daemons of the program inherit copies that uvloop leaves open.
        output = stack.enter_context(TemporaryFile())  # noqa: SIM115  # the stack closes it
        messages = stack.enter_context(TemporaryFile())  # noqa: SIM115
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=messages,
            env=for_installers(os.environ) if env is None else dict(env),  # uvloop takes no other mapping
            cwd=cwd,
            start_new_session=True,
        )
        watchdog.watch(process.pid)  # an orphaned installer would continue writing where the next one works
        try:
            async with asyncio.timeout(deadline_s):
                code = await process.wait()
        except TimeoutError:
            assert deadline_s is not None
            words = " ".join((Path(command[0]).name, *command[1:]))
            raise LaneError(
                f"`{words}` did not end within {deadline_s:g} s; see that the package index answers, and try again"
            ) from None
        finally:
            if process.returncode is None:
                await to_the_end(_end(process))
            elif ends_children:
                signal_group(process.pid, signal.SIGKILL)
                reap(process.pid)
            watchdog.forget(process.pid)
        return Ended(code, _text_of(output), _text_of(messages))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Leave nothing of the program, its children included. It may bring its files into order first."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        await within(_GRACE_S, process.wait())
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
