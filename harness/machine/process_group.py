"""Process groups and their members: those that still run, zombies, and names that outlast an id.

An ended process stays in its group as a zombie until its parent waits for it. Orphans get a new parent, such as a
container's first process. If that is us, `reap` waits for them; if it never waits (`sleep`), zombies stay forever. So a
group of zombies counts as gone, if there is a `/proc`.
"""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.machine.group_reaper import signal_group

_PROC = Path("/proc")
_POLL_S = 0.05
_KILL_S = 5.0  # a process that the kernel holds (a dead network disk) cannot be killed


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """State of a process, from `/proc/PID/stat`."""

    state: str
    group: int
    threads: int
    started: int

    @property
    def has_ended(self) -> bool:
        """True for a zombie; one with threads left holds its port."""
        return self.state == "Z" and self.threads <= 1


def stat_of(pid: int) -> ProcessStat:
    """Read a process's state. Raises `ProcessLookupError`."""
    try:
        content = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    fields = content.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return ProcessStat(state=fields[0], group=int(fields[2]), threads=int(fields[17]), started=int(fields[19]))


def running_members(group: int) -> dict[int, ProcessStat]:
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with suppress(ProcessLookupError):
                stat = stat_of(int(entry.name))
                if stat.group == group and not stat.has_ended:
                    found[int(entry.name)] = stat
    return found


def end_group(group: int, *, grace_s: float) -> None:
    """Send SIGTERM, SIGKILL after `grace_s`, and block until `group` is gone."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_S)):
        signal_group(group, number)
        deadline = time.monotonic() + wait_s
        while running_members(group) and time.monotonic() <= deadline:
            time.sleep(_POLL_S)
        if not running_members(group):
            return


def is_gone(group: int) -> bool:
    """Return True if no process of `group` runs, and reap its orphans."""
    reap(group)  # takes the leader's exit code too, unless the caller has awaited it
    if signal_group(group, 0) and not (_PROC.is_dir() and not running_members(group)):
        return False
    reap(group)  # those that ended since
    return True


def reap(group: int) -> None:
    """Reap ended children of this process in `group`."""
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


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
