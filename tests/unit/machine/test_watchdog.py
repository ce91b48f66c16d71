"""Agents die with the harness, however it dies."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from harness.machine import group_reaper
from harness.machine.watchdog import WATCHDOG_REPLACED, Watchdog
from tests.logged import capture_logs
from tests.session_servers.served import eventually

HARNESS = """
    import asyncio, os, sys
    from pathlib import Path
    from harness.rollouts.agents.agent_output import AgentLog
    from harness.rollouts.agents.process import AgentProcess
    from harness.machine.watchdog import Watchdog

    async def main():
        watchdog = Watchdog()
        workdir = Path(sys.argv[1])
        (workdir / "watchdog").write_text(str(watchdog.pid))
        with AgentLog(workdir / "agent.log") as log:
            process = await AgentProcess.start(
                sys.argv[2:], env=dict(os.environ), workdir=workdir, log=log, watchdog=watchdog
            )
            {then}

    asyncio.run(main())
"""


def start_harness(tmp_path: Path, agent: tuple[str, ...], then: str) -> subprocess.Popen[bytes]:
    """A harness of its own with one agent, that does `then` afterwards."""
    source = textwrap.dedent(HARNESS).replace("{then}", then)
    return subprocess.Popen([sys.executable, "-c", source, str(tmp_path), *agent])


@pytest.mark.parametrize(
    ("number", "leaves"),
    [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGTERM, True), (signal.SIGSEGV, False)],
)
def test_agents_do_not_survive_a_killed_harness(
    tmp_path: Path, number: signal.Signals, family, survivors, *, leaves: bool
):
    """Nor do their children, even daemons, and the watchdog ends after them."""
    with start_harness(tmp_path, family.command(leaves=leaves), "await asyncio.sleep(300)") as harness:
        pids = family.pids()
        watchdog = int((tmp_path / "watchdog").read_text())
        harness.send_signal(number)

    assert survivors([*pids, watchdog]) == []


def test_what_a_harness_wrote_before_it_was_killed_is_read(survivors):
    """Also by a watchdog that starts only then, while a fork of the harness holds the pipe."""
    reading, writing = os.pipe()
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as agent:
        os.write(writing, f"+{agent.pid} \n".encode())
        subprocess.run([sys.executable, "-I", "-S", group_reaper.__file__, "0"], stdin=reading, timeout=60, check=True)
        left = survivors([agent.pid])
        agent.kill()
    os.close(reading)
    os.close(writing)

    assert left == []


INSTALLING = (
    "import asyncio, sys; from harness.machine.program import run; asyncio.run(run(*sys.argv[1:], deadline_s=300))"
)


def test_an_installer_does_not_survive_a_killed_harness(tmp_path: Path, family, survivors):
    """It would continue writing into the folder that the next one removes."""
    with subprocess.Popen([sys.executable, "-c", INSTALLING, *family.command()], cwd=tmp_path) as harness:
        pids = family.pids()
        harness.kill()

    assert survivors(pids) == []


def test_agents_do_not_survive_a_harness_whose_pipe_is_held_by_a_fork(tmp_path: Path, family, survivors):
    """A forked worker of the trainer inherits the pipe, so its end alone is not enough to go by."""
    fork = "import time; os.fork(); (workdir / f'fork-{os.getpid()}').touch(); time.sleep(300)"
    with start_harness(tmp_path, family.command(), fork) as harness:
        pids = family.pids()
        while len(forks := [int(path.name.removeprefix("fork-")) for path in tmp_path.glob("fork-*")]) < 2:
            time.sleep(0.01)
        harness.kill()

    assert survivors(pids) == []
    forks.remove(harness.pid)
    os.kill(forks[0], signal.SIGKILL)


def test_a_watchdog_that_nobody_holds_any_more_ends(survivors):
    """As that of a loop which was closed before anybody closed it: a trainer may run a loop for each step."""
    watchdog = Watchdog()
    pid = watchdog.pid
    del watchdog
    gc.collect()

    assert survivors([pid]) == []


async def test_a_forgotten_group_is_left_alone(survivors):
    """Its number may belong to somebody else by now."""
    watchdog = Watchdog()
    with sleeping_group() as process:
        watchdog.watch(process.pid)
        watchdog.forget(process.pid)
        await watchdog.close()

        assert survivors([process.pid], timeout_s=0) == [process.pid]
        process.kill()


async def test_closing_ends_what_is_still_watched(survivors):
    watchdog = Watchdog()
    with sleeping_group() as process:
        watchdog.watch(process.pid)
        await watchdog.close()

    assert survivors([process.pid, watchdog.pid]) == []


async def test_a_killed_watchdog_is_replaced(survivors):
    """The new one knows the groups of the old one."""
    with capture_logs() as logs:
        watchdog = Watchdog()
        with sleeping_group() as old, sleeping_group() as new:
            watchdog.watch(old.pid)
            first = watchdog.pid
            os.kill(first, signal.SIGKILL)
            await asyncio.to_thread(psutil.wait_procs, [psutil.Process(first)], 60)
            watchdog.watch(new.pid)

            assert watchdog.pid != first
            await watchdog.close()

    assert survivors([old.pid, new.pid]) == []
    assert [line["event"] for line in logs] == [WATCHDOG_REPLACED]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_the_watchdog_outlives_signals_meant_for_everybody(number: signal.Signals, watchdog: Watchdog):
    """A service manager that signals every process must not disarm it."""
    watchdog.watch(2**22 + 1)
    await eventually(lambda: number in ignored_by(watchdog.pid))
    os.kill(watchdog.pid, number)  # thrown away by the kernel before this returns

    assert psutil.Process(watchdog.pid).status() != psutil.STATUS_ZOMBIE


def ignored_by(pid: int) -> set[int]:
    """Numbers of the signals that the process ignores."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def sleeping_group() -> subprocess.Popen[bytes]:
    """A process group of its own."""
    return subprocess.Popen(["sleep", "300"], start_new_session=True)
