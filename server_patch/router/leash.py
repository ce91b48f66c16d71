"""The program between the router and its gateway: the gateway ends when the other end of the leash is let go.

Run as `python -I -S leash.py COMMAND...` with a pipe on standard input, as the first process of a group of its own;
never imported by the router, uses the standard library only. The kernel closes the pipe when the router dies, however
it dies. The group then gets SIGTERM, a short grace period, and SIGKILL. Exits as the command does when that ends first.
"""

import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 3.0
POLL_S = 0.05


def main(command: list[str]) -> int:
    """Run `command` until it ends or the leash is let go; the exit code."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while child.poll() is None:
        if select.select([0], [], [], POLL_S)[0] and not os.read(0, 4096):
            return end(child)
    return child.returncode


def end(child: "subprocess.Popen[bytes]") -> int:
    """End the whole group but this process, which goes last."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    os.killpg(0, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
