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
from contextlib import suppress

MARK = "HARNESS_AGENT_MARK"
"""Variable with the mark."""

GRACE_S = 2.0
POLL_S = 0.05
PARENT_CHECK_S = 1.0


def main(parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_groups(follow(parent))


def follow(parent: int) -> dict[int, str]:
    """Return the groups registered at the end, and their marks."""
    groups: dict[int, str] = {}
    pending = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], PARENT_CHECK_S)[0]:
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
    alive = {group for group in groups if send(group, signal.SIGTERM)}
    is_left = bool(signal_marked(marks, signal.SIGTERM))
    while (alive or is_left) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        alive = {group for group in alive if send(group, 0)}
        is_left = bool(signal_marked(marks, 0))
    for group in alive:
        send(group, signal.SIGKILL)
    signal_marked(marks, signal.SIGKILL)


def signal_marked(marks: set[str], number: int) -> list[int]:
    """Signal all processes that have one of `marks` (0: none). Return their ids."""
    wanted = {f"{MARK}={mark}".encode("ascii") for mark in marks}
    found: list[int] = []
    if not wanted or not os.path.isdir("/proc"):  # noqa: PTH112  # `pathlib` costs this program a third of its start
        return found
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and is_marked(name, wanted):
            # Between the look and the signal a process may end, and its id be given to another one.
            with suppress(OSError):
                handle = os.pidfd_open(int(name))
                try:
                    if is_marked(name, wanted):
                        signal.pidfd_send_signal(handle, number)
                        found.append(int(name))
                finally:
                    os.close(handle)
    return found


def is_marked(pid: str, wanted: set[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            return not wanted.isdisjoint(file.read().split(b"\0"))
    except OSError:  # it has ended, or is another user's
        return False


def send(group: int, number: int) -> bool:
    """Signal `group`. Return False if it is gone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
