"""Lookup of processes behind connections, in a helper process that is restarted if killed."""

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.decoding import json_decoder
from harness.machine import peer_process
from harness.machine.peer_process import Ends, PeerProcess

LOOK_S = 5.0

_SOCKETS = Path("/proc/net/tcp")
_answers = json_decoder(list[PeerProcess | None])


@dataclass(slots=True)
class Peer:
    ends: Ends
    process: asyncio.Future[PeerProcess | None] | None = None
    """Result, or None before the first request."""


class PeerProcesses:
    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="peer-processes")
        self._waiting: list[tuple[Ends, asyncio.Future[PeerProcess | None]]] = []
        self._is_looking = self._is_closed = False
        self._program: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        if _SOCKETS.exists():
            self._executor.submit(self._ask, [])

    def find(self, ends: Ends) -> asyncio.Future[PeerProcess | None]:
        """Begin to look up a client's process; the result may be None."""
        found: asyncio.Future[PeerProcess | None] = asyncio.get_running_loop().create_future()
        if self._is_closed or not ends.is_local or not _SOCKETS.exists():
            found.set_result(None)
            return found
        self._waiting.append((ends, found))
        if not self._is_looking:
            self._look()
        return found

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._executor, self._stop)
        self._executor.shutdown(wait=False)

    def _look(self) -> None:
        asked, self._waiting = self._waiting, []
        self._is_looking = bool(asked) and not self._is_closed
        if not self._is_looking:
            return

        def tell(answers: asyncio.Future[Sequence[PeerProcess | None]]) -> None:
            for (_, found), process in zip(asked, answers.result(), strict=True):
                if not found.done():
                    found.set_result(process)
            self._look()

        questions = [ends for ends, _ in asked]
        asyncio.get_running_loop().run_in_executor(self._executor, self._ask, questions).add_done_callback(tell)

    def _ask(self, questions: Sequence[Ends]) -> Sequence[PeerProcess | None]:
        try:
            program = self._program = self._program or _start()
            assert program.stdin is not None
            assert program.stdout is not None
            program.stdin.write(msgspec.json.encode(questions) + b"\n")
            program.stdin.flush()
            answer = select.poll()
            answer.register(program.stdout)
            if answer.poll(LOOK_S * 1000):
                return _answers.decode(program.stdout.readline())
        except (OSError, msgspec.DecodeError):  # it was killed
            pass
        self._stop()
        return [None] * len(questions)

    def _stop(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            program.kill()
            program.communicate()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", peer_process.__file__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
