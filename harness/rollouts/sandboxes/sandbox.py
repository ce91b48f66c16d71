"""The seam of sandboxes: five verbs, small enough for a container, a namespace, or a remote environment.

Paths are the same on both sides: a box shows the workdir where the harness has it. So the agent's variables need no
translation.
"""

import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.errors import LaneError, SandboxFailed
from harness.machine.uv import Ended, run

_FREE_BYTES = 1 << 16


class RunningCommand(Protocol):
    """A command in a box. Its starter owns it until `stop` returns or raises."""

    async def wait(self) -> int:
        """Return the exit code, or minus the number of a signal."""
        ...

    def signal(self, number: int) -> bool:
        """Send a signal. Return whether any process could receive it."""
        ...

    async def stop(self, *, grace_s: float) -> list[int]:
        """End the command and everything it started. Return the ids of processes that could not be ended."""
        ...


StartOnHost = Callable[[Sequence[str], Mapping[str, str], Path], Awaitable[RunningCommand]]
"""Starts a command of this machine, with exactly that environment, in a directory. Its output is the agent's log."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a box shows beside its system."""

    name: str
    """Unique name, which says whose box it is; see `left_behind.py`."""
    workdir: Path
    """The rollout's directory, writable."""
    folder: Path
    """Folder of the harness for this box, read-only: the relay's socket and client."""
    programs: Sequence[Path] = ()
    """Files and folders of the agent, read-only."""


class Sandbox(Protocol):
    """A box for the commands of one rollout."""

    has_own_network: bool
    """False if the agent reaches the session server as its harness does."""

    async def start(self) -> None:
        """Make the box. Raises `SandboxFailed`."""
        ...

    async def exec(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, on_host: StartOnHost
    ) -> RunningCommand:
        """Start a command in the box. Raises `OSError`, `ValueError` or `SandboxFailed`."""
        ...

    async def put(self, source: Path, target: Path) -> None:
        """Copy a file or folder into the box. Raises `SandboxFailed`."""
        ...

    async def get(self, source: Path, target: Path) -> None:
        """Copy a file or folder out of the box. Raises `SandboxFailed`."""
        ...

    async def find_failure(self) -> str | None:
        """Return why the box, not its command, made the command fail, or None. Asked before `stop`."""
        ...

    async def stop(self) -> None:
        """Remove the box and everything in it, in bounded time. Idempotent. Raises `SandboxFailed`."""
        ...


async def call(*command: str, deadline_s: float, env: Mapping[str, str]) -> Ended:
    """Run a program of this machine to its end. Raises `SandboxFailed` if it is missing or late."""
    program = shutil.which(command[0], path=env.get("PATH"))
    if program is None:
        raise SandboxFailed(f"no program {command[0]} on PATH; install it, or choose another kind of sandbox")
    try:
        return await run(program, *command[1:], deadline_s=deadline_s, env=env)
    except LaneError:
        raise SandboxFailed(f"`{' '.join(command[:2])}` did not end within {deadline_s:g} s") from None
    except OSError as error:
        raise SandboxFailed(f"{command[0]} does not start: {error}") from error


def describe_full_disk(folder: Path) -> str | None:
    """Return a sentence if the disk of `folder` is full, else None."""
    if shutil.disk_usage(folder).free >= _FREE_BYTES:
        return None
    return f"the disk of {folder} is full; free space"
