"""Which process a number means, from what the kernel says in `/proc`, and how one begins that is not lost before.

A process id comes back as somebody else's. A process is therefore named by its id, the tick it was started at and the
boot that tick counts from, and nothing is signaled that is not still the process of that name.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.machine.process_group import running_members, stat_of

WAIT_FOR_START = 'read -r _ && exec "$@" </dev/null'
"""A shell's program: becomes the command in its arguments when it reads a line, ends without one; see `spawn_held`."""


@dataclass(frozen=True, slots=True)
class ProcessName:
    """One process of this machine, for ever."""

    pid: int
    started: int
    """Clock ticks between the boot and its start."""
    boot: str

    @classmethod
    def of(cls, pid: int) -> "ProcessName":
        """The name of the running process `pid`. Raises `ProcessLookupError`."""
        return cls(pid, stat_of(pid).started, _boot())

    def is_alive(self) -> bool:
        """Whether this very process still runs; one that has ended and was not waited for does not."""
        try:
            stat = stat_of(self.pid)
        except ProcessLookupError:
            return False
        return (stat.started, _boot()) == (self.started, self.boot) and not stat.has_ended

    def is_in(self, group: int) -> bool:
        """Whether this very process runs and belongs to `group`."""
        with suppress(ProcessLookupError):
            return self.is_alive() and stat_of(self.pid).group == group
        return False


class HeldProcess(NamedTuple):
    """The first process of a group, which has not become the program yet."""

    pid: int
    gate: int
    """A descriptor: a line written to it starts the program, closing it without ends the process."""


def spawn_held(command: Sequence[str], environment: Mapping[str, str], log: Path) -> HeldProcess:
    """A process in a session and a group of its own that will run `command`; what it prints goes to `log`.

    The caller closes the gate, and waits for the process if it stays to see its end. Not a `Popen`, which complains
    when it is forgotten: a server may outlive the program that started it.
    """
    start_line, gate = os.pipe()
    try:
        actions = (
            (os.POSIX_SPAWN_DUP2, start_line, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        )
        shell = ("/bin/sh", "-c", f"cd / && {WAIT_FOR_START}", "sh", *command)
        ours = (signal.SIGPIPE,)  # Python ignores it, the server does not inherit that
        pid = os.posix_spawn(shell[0], shell, environment, file_actions=actions, setsid=True, setsigdef=ours)
        return HeldProcess(pid, gate)
    except BaseException:
        os.close(gate)
        raise
    finally:
        os.close(start_line)


def members(group: int) -> list[ProcessName]:
    """The running processes of `group`."""
    return [ProcessName(pid, stat.started, _boot()) for pid, stat in running_members(group).items()]


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
