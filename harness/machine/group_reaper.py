"""The program behind `Watchdog`: kills process groups whose owner is gone, and processes that left these groups.

Runs as `python -I -S group_reaper.py PARENT_PID`; standard library only, for a fast start. Reads `+PGID MARK` and
`-PGID` lines until the end of input or of the parent (a fork may keep the pipe open).

A daemon (`setsid`, double fork) is in no group that its starter knows. It is found by a mark: a variable in the
environment of the group's first process, which children inherit. Only a process that clears or overwrites its
environment, or runs as another user, escapes. Without `/proc` none is found.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Collection

MARK = "HARNESS_AGENT_MARK"
"""Variable with the mark."""

GRACE_S = 2.0
POLL_S = 0.05
PARENT_CHECK_S = 1.0
KILLS = 20


def main(parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_groups(follow(parent))


def follow(parent: int) -> dict[int, str]:
    """Return the groups registered at the end, and their marks."""
    groups: dict[int, str] = {}
    pending = b""
    while True:
        is_left = os.getppid() != parent  # what it wrote before it died is read to the end
        if not select.select([0], [], [], 0 if is_left else PARENT_CHECK_S)[0]:
            if is_left:
                break
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            register(groups, line)
    return groups


def register(groups: dict[int, str], line: bytes) -> None:
    group, _, mark = line[1:].decode("ascii").partition(" ")
    if line.startswith(b"+"):
        groups[int(group)] = mark
    else:
        groups.pop(int(group), None)


def end_groups(groups: dict[int, str]) -> None:
    """Send SIGTERM, then SIGKILL after the grace period."""
    deadline = time.monotonic() + GRACE_S
    marks = {mark for mark in groups.values() if mark}
    alive = {group for group in groups if signal_group(group, signal.SIGTERM)}
    is_left = bool(signal_marked(marks, signal.SIGTERM, told=alive))
    while (alive or is_left) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        alive = {group for group in alive if signal_group(group, 0)}
        is_left = bool(signal_marked(marks, 0))
    for group in alive:
        signal_group(group, signal.SIGKILL)
    for _ in range(KILLS):  # they may start others meanwhile
        if not signal_marked(marks, signal.SIGKILL):
            break
        time.sleep(POLL_S)


def signal_marked(marks: Collection[str], number: int, told: Collection[int] = ()) -> list[int]:
    """Signal processes with one of `marks` (0: none), except members of the groups `told`. Return the ids of all."""
    wanted = {f"{MARK}={mark}".encode("ascii") for mark in marks}
    try:
        names = os.listdir("/proc") if wanted else []  # noqa: PTH208  # `pathlib` is slow to start
    except OSError:  # no `/proc`, or no descriptor left
        return []
    return [int(name) for name in names if name.isdigit() and signal_process(int(name), number, wanted, told)]


def signal_process(pid: int, number: int, wanted: set[bytes], told: Collection[int]) -> bool:
    """Signal one process if it is marked. Return whether it was there."""
    if not is_marked(pid, wanted):
        return False
    # Between the look and the signal a process may end, and its id be given to another one. A descriptor of the process
    # excludes that; some builds of Python and some kernels have none, where a second look has to do.
    try:
        handle = os.pidfd_open(pid)
    except (AttributeError, OSError):
        handle = None
    try:
        if not is_marked(pid, wanted):
            return False
        if os.getpgid(pid) not in told:
            if handle is None or not hasattr(signal, "pidfd_send_signal"):
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        if handle is not None:
            os.close(handle)


def is_marked(pid: int, wanted: set[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123  # as above
            return not wanted.isdisjoint(file.read().split(b"\0"))
    except OSError:  # it has ended, or is another user's
        return False


def signal_group(group: int, number: int) -> bool:
    """Signal a group. Return False if it has no process, zombies included."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
