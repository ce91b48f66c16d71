"""Watchdog that kills agents when the harness dies, even by `kill -9`.

A process per manager (`group_reaper.py`) learns every agent's process group through a pipe, which the kernel closes
when the harness dies. Bytes in the pipe outlive their writer, so a registration needs no answer.
"""

import asyncio
import os
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path

from harness.machine.group_reaper import MARK
from harness.machine.log import get_logger

WATCHDOG_REPLACED = "watchdog_replaced"
WATCHDOG_KILLED = "watchdog_killed"

_PROGRAM = Path(__file__).with_name("group_reaper.py")
_EXIT_TIMEOUT_S = 5.0  # more than the program's own grace period
_IDLE_EXIT_TIMEOUT_S = 0.5  # a program without groups ends at once; with some it is left to itself

_log = get_logger(__name__)


class Watchdog:
    def __init__(self) -> None:
        self._groups: dict[int, str] = {}
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, group: int, mark: str = "") -> None:
        """Kill `group`, and processes with `mark` (see `group_reaper`), when this process dies."""
        self._groups[group] = mark
        self._tell(f"+{group} {mark}\n")

    def forget(self, group: int) -> None:
        """Forget `group`: its number may be reused."""
        self._groups.pop(group, None)
        self._tell(f"-{group}\n")

    async def close(self) -> None:
        self._at_loss.detach()
        _close_input(self._process)
        try:
            await asyncio.to_thread(self._process.wait, _EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _log.warning(WATCHDOG_KILLED, pid=self.pid)
        finally:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        self._process = _start_program()
        self._at_loss = weakref.finalize(self, _abandon, self._process)
        self._at_loss.atexit = False  # the program sees the end of this process by itself

    def _tell(self, line: str) -> None:
        try:
            self._write(line)
        except BrokenPipeError:  # the watchdog was killed: register everything with a new one
            _log.warning(WATCHDOG_REPLACED, pid=self.pid, groups=len(self._groups))
            _close_input(self._process)
            self._process.wait()
            self._at_loss.detach()
            self._start()
            for group, mark in self._groups.items():
                self._write(f"+{group} {mark}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), line.encode())


def _start_program() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_PROGRAM), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        # Below an agent, its mark would make the outer harness end this program, which has the inner agents to end.
        env={name: value for name, value in os.environ.items() if name != MARK},
        start_new_session=True,
        bufsize=0,
    )


def _abandon(process: subprocess.Popen[bytes]) -> None:
    _close_input(process)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_IDLE_EXIT_TIMEOUT_S)


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
