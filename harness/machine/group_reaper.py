"""The program behind `Watchdog`: kills process groups whose owner is gone.

Runs as `python -I -S group_reaper.py PARENT_PID`; standard library only, for a fast start. Reads `+PGID` and `-PGID`
lines until the end of input or of the parent (a fork may keep the pipe open).
"""

import os
import select
import signal
import sys
import time

GRACE_S = 2.0
POLL_S = 0.05
PARENT_CHECK_S = 1.0


def main(parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_groups(follow(parent))


def follow(parent: int) -> set[int]:
    """Return the groups registered at the end."""
    groups: set[int] = set()
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


def register(groups: set[int], line: bytes) -> None:
    change = groups.add if line.startswith(b"+") else groups.discard
    change(int(line[1:]))


def end_groups(groups: set[int]) -> None:
    """Send SIGTERM, then SIGKILL after the grace period."""
    deadline = time.monotonic() + GRACE_S
    alive = {group for group in groups if send(group, signal.SIGTERM)}
    while alive and time.monotonic() < deadline:
        time.sleep(POLL_S)
        alive = {group for group in alive if send(group, 0)}
    for group in alive:
        send(group, signal.SIGKILL)


def send(group: int, number: int) -> bool:
    """Signal `group`. Return False if it is gone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
