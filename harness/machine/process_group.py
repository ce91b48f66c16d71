"""A process group as the kernel knows it: who of it still runs, and what of it waits to be waited for.

A process that has ended stays in its group, as a zombie, until its parent waits for it, and a signal to the group goes
on to reach it. Orphans get a new parent: the first process of a container, or the nearest subreaper. When that is us,
nobody else waits for them, so `reap` does; when it is a process that waits for nobody (`sleep`, a program that is no
init), zombies stay for good. A group of zombies therefore counts as gone; where there is no `/proc`, as there.
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_POLL_S = 0.05
_KILL_S = 5.0  # a process that the kernel holds (a dead network disk) cannot be killed


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The state of a process, from `/proc/PID/stat`."""

    state: str
    group: int
    threads: int
    started: int
    """Clock ticks between the boot and its start."""

    @property
    def has_ended(self) -> bool:
        """It only waits to be waited for. While other threads of it are on their way out it still holds its port."""
        return self.state == "Z" and self.threads <= 1


def stat_of(pid: int) -> ProcessStat:
    """The state of process `pid`. Raises `ProcessLookupError`."""
    try:
        content = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    fields = content.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return ProcessStat(state=fields[0], group=int(fields[2]), threads=int(fields[17]), started=int(fields[19]))


def running_members(group: int) -> dict[int, ProcessStat]:
    """The processes of `group` that have not ended, by process id. Looks at every process of the machine."""
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with suppress(ProcessLookupError):
                stat = stat_of(int(entry.name))
                if stat.group == group and not stat.has_ended:
                    found[int(entry.name)] = stat
    return found


def signal_group(group: int, number: int) -> bool:
    """Send a signal to all of `group`; whether it still had a process that may be signaled, zombies included."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end_group(group: int, *, grace_s: float) -> None:
    """SIGTERM to every process of `group`, SIGKILL to what is left after `grace_s`; returns when nothing is. Blocks.

    The caller knows whose group it is.
    """
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_S)):
        signal_group(group, number)
        deadline = time.monotonic() + wait_s
        while running_members(group) and time.monotonic() <= deadline:
            time.sleep(_POLL_S)
        if not running_members(group):
            return


def is_gone(group: int) -> bool:
    """Whether nothing of `group` runs any more; orphans of it that have ended are reaped.

    Its leader must have been waited for already: this would take its exit code away from who waits for it.
    """
    reap(group)
    return not signal_group(group, 0) or (_PROC.is_dir() and not running_members(group))


def reap(group: int) -> None:
    """Wait for every child of this process that belonged to `group` and has ended; for none that runs."""
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
