"""The program between the router and its gateway. It ends the gateway when the router dies.

Runs as `python -I -S end_with_parent.py LOG LOG_BYTES COMMAND...`, leading its own group, with a pipe on standard input
that the kernel closes when the router dies. Standard library only. Exits as the command does if that ends first.
"""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 3.0
POLL_S = 0.05
LEASH = 0
"""Descriptor of the pipe."""


class Log:
    def __init__(self, path: str, most_bytes: int) -> None:
        self._path = Path(path)
        self._most_bytes = most_bytes

    def write(self, said: bytes) -> None:
        try:
            if self._path.exists() and self._path.stat().st_size + len(said) > self._most_bytes:
                self._path.replace(f"{self._path}.1")
            with self._path.open("ab") as file:
                file.write(said)
        except OSError:
            pass  # a full disk; this program has no other place to report it


def main(log: Log, command: list[str]) -> int:
    """Run `command` until it ends or the pipe closes. Return the exit code."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    ) as child:
        assert child.stdout is not None
        listened_to = [LEASH, child.stdout.fileno()]
        while child.poll() is None:
            for ready in select.select(listened_to, [], [], POLL_S)[0]:
                said = os.read(ready, 65536)
                if not said and ready == LEASH:
                    return end(child, log)
                if not said:
                    listened_to.remove(ready)
                elif ready != LEASH:
                    log.write(said)
        hear_out(child, log)
        return child.returncode


def hear_out(child: "subprocess.Popen[bytes]", log: Log) -> None:
    assert child.stdout is not None
    while select.select([child.stdout], [], [], 0)[0]:
        said = os.read(child.stdout.fileno(), 65536)
        if not said:
            return
        log.write(said)


def end(child: "subprocess.Popen[bytes]", log: Log) -> int:
    """End the group: SIGTERM, a grace period, SIGKILL."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        hear_out(child, log)
        time.sleep(POLL_S)
    hear_out(child, log)
    os.killpg(0, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main(Log(sys.argv[1], int(sys.argv[2])), sys.argv[3:]))
