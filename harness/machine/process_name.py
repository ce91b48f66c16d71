"""Process identity (id, start tick and boot, because ids are reused), and processes held back until recorded."""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.machine.process_group import running_members, stat_of

WAIT_FOR_START = 'read -r _ && exec "$@" </dev/null'
"""Shell program that runs its arguments on a line of input, and exits at end of input."""
WAIT_FOR_TERMINAL = 'read -r _ && exec "$@" <"$0" >"$0" 2>&1'
"""As `WAIT_FOR_START`, on the terminal `$0`. A session's leader that opens one gets it as controlling terminal."""


@dataclass(frozen=True, slots=True)
class ProcessName:
    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> "ProcessName":
        """Return a process's name. Raises `ProcessLookupError`."""
        return cls(pid, stat_of(pid).started, _boot())

    def is_alive(self) -> bool:
        try:
            stat = stat_of(self.pid)
        except ProcessLookupError:
            return False
        return (stat.started, _boot()) == (self.started, self.boot) and not stat.has_ended

    def is_in(self, group: int) -> bool:
        with suppress(ProcessLookupError):
            return self.is_alive() and stat_of(self.pid).group == group
        return False


class HeldProcess(NamedTuple):
    """First process of a group, before its program."""

    pid: int
    gate: int
    """Descriptor; a line starts the program, closing ends it."""


def spawn_held(command: Sequence[str], environment: Mapping[str, str], log: Path) -> HeldProcess:
    """Start a process, in its own session and group, held before `command`. The caller closes the gate."""
    start_line, gate = os.pipe()
    try:
        actions = (
            (os.POSIX_SPAWN_DUP2, start_line, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        )
        shell = ("/bin/sh", "-c", f"cd / && {WAIT_FOR_START}", "sh", *command)
        ours = (signal.SIGPIPE,)  # Python ignores it; the server must not inherit that
        # No `Popen`, which warns when it is dropped: a server may outlive this program.
        pid = os.posix_spawn(shell[0], shell, environment, file_actions=actions, setsid=True, setsigdef=ours)
        return HeldProcess(pid, gate)
    except BaseException:
        os.close(gate)
        raise
    finally:
        os.close(start_line)


def members(group: int) -> list[ProcessName]:
    return [ProcessName(pid, stat.started, _boot()) for pid, stat in running_members(group).items()]


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
