"""The program that looks up the processes of clients, handed from one server of a test process to the next.

A server of a test lives for a tenth of a second; a program of its own costs 45 ms of processor time, as much as all
else that such a test does.
"""

import asyncio
import subprocess
from collections.abc import Iterator
from threading import Lock

import pytest

from harness.machine import peer_processes
from harness.machine.peer_processes import PeerProcesses


class SharedProgram:
    """One program, which a server has while it runs; a server beside that one starts its own."""

    def __init__(self) -> None:
        self._start, self._close = peer_processes._start, PeerProcesses.close
        self._lock = Lock()
        self._is_taken = False
        self._program = self._start()

    def take(self) -> "subprocess.Popen[bytes]":
        """The program, or a new one if it was killed."""
        with self._lock:
            if self._program.poll() is not None:
                self._program, self._is_taken = self._start(), False
            is_taken, self._is_taken = self._is_taken, True
        return self._start() if is_taken else self._program

    async def close(self, lookups: PeerProcesses) -> None:
        """Take the program from `lookups` behind its last question, and close what is left."""
        lookups._is_closed = True
        await asyncio.get_running_loop().run_in_executor(lookups._executor, self._take_back, lookups)
        await self._close(lookups)

    def _take_back(self, lookups: PeerProcesses) -> None:
        with self._lock:
            if lookups._program is self._program:
                lookups._program, self._is_taken = None, False

    def end(self) -> None:
        """End it, and wait."""
        self._program.kill()
        self._program.communicate()


@pytest.fixture(scope="session")
def shared_program() -> Iterator[SharedProgram]:
    """The program of this test process."""
    program = SharedProgram()
    yield program
    program.end()


@pytest.fixture(autouse=True)
def lookups(shared_program: SharedProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of a test take turns with one program; a module whose subject it is overrides this."""
    monkeypatch.setattr(peer_processes, "_start", shared_program.take)

    async def close(lookups: PeerProcesses) -> None:
        await shared_program.close(lookups)

    monkeypatch.setattr(PeerProcesses, "close", close)
