"""The seam of sandboxes, small enough for a container, a namespace, or a remote environment.

A box shows the workdir at the harness's own path, so the agent's variables need no translation.
"""

import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.errors import LaneError, SandboxFailed
from harness.machine.program import Ended, run

NONE = "none"
BWRAP = "bwrap"
CONTAINERS = ("podman", "docker")

_FREE_BYTES = 1 << 16


class RunningCommand(Protocol):
    """Command in a box. Its starter owns it until `stop` ends."""

    async def wait(self) -> int:
        """Return the exit code, minus the number of a signal, or 128 plus it."""

    def signal(self, number: int) -> bool:
        """Send a signal. Return whether a process could receive it."""

    async def stop(self, *, grace_s: float) -> list[int]:
        """End the command and its descendants. Return the ids of those left."""


StartOnHost = Callable[[Sequence[str], Mapping[str, str], Path], Awaitable[RunningCommand]]
"""Starter of a command of this machine, with its environment and directory. Its output is the agent's log."""


@dataclass(frozen=True, slots=True)
class Place:
    """Paths of this machine that a box shows."""

    name: str
    """Unique name; see `boxed.py`."""
    workdir: Path
    """Rollout's directory, writable."""
    folder: Path
    """Relay's socket and client, read-only."""
    programs: Sequence[Path] = ()
    """Agent's files and folders, read-only."""


class Sandbox(Protocol):
    """A box for the commands of one rollout."""

    has_own_network: bool
    """False if the agent reaches the session server as its harness does."""

    async def start(self) -> None:
        """Make the box. Raises `SandboxFailed`."""

    async def exec(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, on_host: StartOnHost
    ) -> RunningCommand:
        """Start a command in the box. Raises `OSError`, `ValueError` or `SandboxFailed`."""

    async def put(self, source: Path, target: Path) -> None:
        """Copy a file or folder into the box. Raises `SandboxFailed`."""

    async def get(self, source: Path, target: Path) -> None:
        """Copy a file or folder out of the box. Raises `SandboxFailed`."""

    async def find_failure(self) -> str | None:
        """Return why the box made its command fail, or None. Called before `stop`."""

    async def stop(self) -> None:
        """Remove the box in bounded time. Idempotent. Raises `SandboxFailed`."""


async def call(*command: str, deadline_s: float, env: Mapping[str, str], cwd: Path | None = None) -> Ended:
    """Run a program. Raises `SandboxFailed` if it is missing or late."""
    program = shutil.which(command[0], path=env.get("PATH"))
    if program is None:
        raise SandboxFailed(f"no program {command[0]} on PATH; install it, or choose another kind of sandbox")
    try:
        return await run(program, *command[1:], deadline_s=deadline_s, env=env, cwd=cwd)
    except LaneError:
        raise SandboxFailed(f"`{' '.join(command[:2])}` did not end within {deadline_s:g} s") from None
    except OSError as error:
        raise SandboxFailed(f"{command[0]} does not start: {error}") from error


def describe_full_disk(folder: Path) -> str | None:
    """Return a sentence if the disk is full, else None."""
    if shutil.disk_usage(folder).free >= _FREE_BYTES:
        return None
    return f"the disk of {folder} is full; free space"
