"""Real processes for tests, and a look at which of them are left."""

import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from harness.machine.watchdog import Watchdog
from tests.processes.family import Family, is_running

PythonProgram = Callable[[str], tuple[str, ...]]


@pytest.fixture(name="family")
def _family(tmp_path: Path) -> Family:
    return Family(tmp_path)


@pytest.fixture(name="python_program")
def _python_program(tmp_path: Path) -> PythonProgram:
    """The command that runs a piece of Python as a program."""

    def command(source: str) -> tuple[str, ...]:
        return (sys.executable, "-S", "-c", textwrap.dedent(source))

    return command


@pytest_asyncio.fixture(name="watchdog")
async def _watchdog() -> AsyncIterator[Watchdog]:
    watchdog = Watchdog()
    yield watchdog
    await watchdog.close()


@pytest.fixture(name="survivors")
def _survivors() -> Callable[..., list[int]]:
    """The pids that still run after a bounded wait for all of them to end."""

    def wait(pids: list[int], timeout_s: float = 30) -> list[int]:
        deadline = time.monotonic() + timeout_s
        while (alive := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return alive

    return wait
