"""Processes that are hard to get rid of, and a look at which are left."""

import asyncio
import sys
import time
from pathlib import Path

import psutil

STUBBORN_CHILD = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(300)
"""

PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", {STUBBORN_CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
pids = sys.argv[1]
with open(pids + ".part", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename(pids + ".part", pids)
"""

# The child is a daemon: of a session and a group of its own, and nobody's child.
DAEMONIZING = """
import os, signal, sys, time
reader, writer = os.pipe()
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(writer, b"%d" % os.getpid())
    time.sleep(300)
os.wait()
pids = sys.argv[1]
with open(pids + ".part", "w") as file:
    file.write(f"{os.getpid()} {int(os.read(reader, 20))}")
os.rename(pids + ".part", pids)
"""


class Family:
    """An agent program with a child that ignores SIGTERM; their process ids are in a file in `workdir`."""

    def __init__(self, workdir: Path) -> None:
        self._pids_file = workdir / "family"

    def command(self, *, stays: bool = True, anywhere: bool = False, leaves: bool = False) -> tuple[str, ...]:
        """The agent's command; it exits while its child runs when it does not stay.

        With `anywhere` it works for the family of whichever directory it runs in. A child that `leaves` is a daemon.
        """
        source = (DAEMONIZING if leaves else PARENT) + ("time.sleep(300)" if stays else "")
        return (sys.executable, "-S", "-c", source, self._pids_file.name if anywhere else str(self._pids_file))

    def pids(self, timeout_s: float = 60) -> list[int]:
        """Parent and child, once both are there."""
        return read_pids(self._pids_file, timeout_s)

    async def appears(self) -> list[int]:
        """The same, without blocking the event loop."""
        return await asyncio.to_thread(self.pids)


def read_pids(path: Path, timeout_s: float = 60) -> list[int]:
    """The process ids in the file at `path`, once it is there."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)
    return [int(pid) for pid in path.read_text().split()]


def is_running(pid: int) -> bool:
    """Whether `pid` is a process that still runs; a zombie that nobody has reaped yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
