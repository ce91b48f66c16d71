"""The program between the router and its gateway: the gateway ends when the other end of the leash is let go.

Run as `python -I -S leash.py LOG LOG_BYTES COMMAND...` with a pipe on standard input, as the first process of a group
of its own; never imported by the router, uses the standard library only. The kernel closes the pipe when the router
dies, however it dies. The group then gets SIGTERM, a short grace period, and SIGKILL. Exits as the command does when
that ends first.

The output of the command goes to LOG. When that has come to LOG_BYTES it becomes LOG.1, in the place of the one before:
a gateway that complains for weeks fills no disk. A log that cannot be written is given up; the gateway goes on.
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
"""The descriptor that is let go."""


class Log:
    """The log at `path`, begun anew at `most_bytes`."""

    def __init__(self, path: str, most_bytes: int) -> None:
        self._path = Path(path)
        self._most_bytes = most_bytes

    def write(self, said: bytes) -> None:
        """Append what was said."""
        try:
            if self._path.exists() and self._path.stat().st_size + len(said) > self._most_bytes:
                self._path.replace(f"{self._path}.1")
            with self._path.open("ab") as file:
                file.write(said)
        except OSError:
            pass  # a full disk: nobody else is told by this program


def main(log: Log, command: list[str]) -> int:
    """Run `command` until it ends or the leash is let go; the exit code."""
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
    """Take down what the command has said by now."""
    assert child.stdout is not None
    while select.select([child.stdout], [], [], 0)[0]:
        said = os.read(child.stdout.fileno(), 65536)
        if not said:
            return
        log.write(said)


def end(child: "subprocess.Popen[bytes]", log: Log) -> int:
    """End the whole group but this process, which goes last."""
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
