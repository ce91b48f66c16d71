"""Process groups: members that still run, and zombies.

An ended process stays in its group as a zombie until its parent waits for it. Orphans get a new parent, such as a
container's first process. If that is us, `reap` waits for them; if it never waits (`sleep`), zombies stay forever. So a
group of zombies counts as gone, if there is a `/proc`.
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
