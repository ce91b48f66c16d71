"""An agent's process group: started, logged, ended as a whole, reaped."""

import asyncio
import ctypes
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from harness.machine.process_group import is_gone
from harness.machine.watchdog import Watchdog
from harness.rollouts.agents.agent_output import AgentLog
from harness.rollouts.agents.process import AgentProcess
from tests.session_servers.served import eventually

ENV = {"PATH": os.environ["PATH"]}


@asynccontextmanager
async def running(
    command: tuple[str, ...], workdir: Path, watchdog: Watchdog, *, grace_s: float = 0.3
) -> AsyncIterator[AgentProcess]:
    """`command` as an agent that is stopped at the end."""
    with AgentLog(workdir / "agent.log", head_bytes=1 << 16, tail_bytes=1 << 10) as log:
        process = await AgentProcess.start(command, env=ENV, workdir=workdir, log=log, watchdog=watchdog)
        try:
            yield process
        finally:
            await process.stop(grace_s=grace_s)


async def test_an_exit_code_comes_back(tmp_path: Path, watchdog: Watchdog, python_program):
    """With everything that was printed, in order, standard error included."""
    command = python_program("""
        import sys
        print("out", flush=True)
        print("err", file=sys.stderr, flush=True)
        sys.exit(3)
    """)
    async with running(command, tmp_path, watchdog) as process:
        code = await process.wait()

    assert code == 3
    assert (tmp_path / "agent.log").read_text() == "out\nerr\n"


async def test_a_signal_comes_back_as_its_negative_number(tmp_path: Path, watchdog: Watchdog):
    async with running(("/bin/sh", "-c", "kill -9 $$"), tmp_path, watchdog) as process:
        assert await process.wait() == -signal.SIGKILL


async def test_the_agent_is_the_leader_of_its_own_group_and_session(tmp_path: Path, watchdog: Watchdog, python_program):
    """The shell that held it back has become the agent: no process in between."""
    command = python_program("""
        import os, sys
        print(os.getpid(), os.getpgrp(), os.getsid(0), sys.stdin.read() == "")
    """)
    async with running(command, tmp_path, watchdog) as process:
        await process.wait()

    pid = process.group
    assert (tmp_path / "agent.log").read_text() == f"{pid} {pid} {pid} True\n"


async def test_the_environment_is_the_one_given(tmp_path: Path, watchdog: Watchdog, python_program, monkeypatch):
    """Nothing of the harness's own environment reaches an agent by accident."""
    monkeypatch.setenv("SECRET_OF_THE_HARNESS", "1")
    command = python_program("import os; print(sorted(os.environ))")
    async with running(command, tmp_path, watchdog) as process:
        await process.wait()

    names = (tmp_path / "agent.log").read_text()
    assert "PATH" in names
    assert "SECRET_OF_THE_HARNESS" not in names


async def test_stopping_ends_grandchildren_that_ignore_sigterm(tmp_path: Path, watchdog: Watchdog, family, survivors):
    """The whole group is gone when `stop` returns."""
    async with running(family.command(), tmp_path, watchdog):
        pids = await family.appears()

    assert survivors(pids) == []


async def test_grandchildren_of_an_agent_that_exited_are_ended_too(
    tmp_path: Path, watchdog: Watchdog, family, survivors
):
    """An agent that leaves helpers behind does not leak them."""
    async with running(family.command(stays=False), tmp_path, watchdog) as process:
        await process.wait()

    assert survivors(family.pids()) == []


@pytest.mark.parametrize("stays", [True, False], ids=["the agent runs", "the agent has exited"])
async def test_a_daemon_ends_with_its_agent(tmp_path: Path, watchdog: Watchdog, family, survivors, *, stays: bool):
    """Forked twice, in a session of its own, and deaf to SIGTERM."""
    async with running(family.command(stays=stays, leaves=True), tmp_path, watchdog):
        agent, daemon = await family.appears()
        assert os.getsid(daemon) != agent

    assert survivors([agent, daemon]) == []


async def test_an_agent_gets_sigterm_once(tmp_path: Path, watchdog: Watchdog, python_program):
    """It has the mark, too; a second signal would end its cleaning up."""
    command = python_program("""
        import os, signal, sys, time
        def end(number, frame):
            os.write(1, b"told\\n")  # `print` is not reentrant
            sys.exit()
        signal.signal(signal.SIGTERM, end)
        try:
            print("ready", flush=True)
            time.sleep(300)
        finally:
            time.sleep(0.2)
            print("done", flush=True)
    """)
    log = tmp_path / "agent.log"
    async with running(command, tmp_path, watchdog, grace_s=60):
        await eventually(lambda: log.exists() and "ready" in log.read_text())

    assert log.read_text() == "ready\ntold\ndone\n"


async def test_a_daemon_ends_on_a_python_without_descriptors_of_processes(
    tmp_path: Path, watchdog: Watchdog, family, survivors, monkeypatch
):
    """Some builds have no `pidfd_open`."""
    monkeypatch.delattr(os, "pidfd_open")
    async with running(family.command(leaves=True), tmp_path, watchdog):
        pids = await family.appears()

    assert survivors(pids) == []


async def test_another_agents_daemon_runs_on(tmp_path: Path, watchdog: Watchdog, family, survivors):
    """Each process has a mark of its own."""
    async with running(family.command(leaves=True), tmp_path, watchdog):
        _, daemon = await family.appears()
        async with running(("/bin/true",), tmp_path, watchdog) as process:
            await process.wait()
        assert survivors([daemon], timeout_s=0) == [daemon]

    assert survivors([daemon]) == []


async def test_a_cancelled_stop_still_kills(tmp_path: Path, watchdog: Watchdog, family, survivors):
    """Impatience of the caller does not leave an agent behind."""
    with AgentLog(tmp_path / "agent.log") as log:
        process = await AgentProcess.start(family.command(), env=ENV, workdir=tmp_path, log=log, watchdog=watchdog)
        pids = await family.appears()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await process.stop(grace_s=300)

    assert survivors(pids) == []


async def test_a_flood_is_bounded(tmp_path: Path, watchdog: Watchdog, python_program):
    """Hundreds of megabytes of output end up as head, note and tail."""
    command = python_program("""
        import os
        block = b"x" * 65535 + b"\\n"
        for _ in range(3000):
            os.write(1, block)
        os.write(1, b"the end")
    """)
    before = psutil.Process().memory_info().rss
    async with running(command, tmp_path, watchdog) as process:
        assert await process.wait() == 0

    log = (tmp_path / "agent.log").read_bytes()
    assert len(log) < (1 << 17)
    assert log.endswith(b"the end")
    assert b"bytes left out" in log
    assert psutil.Process().memory_info().rss - before < 50 << 20


async def test_a_process_that_escapes_cannot_hold_up_the_end(tmp_path: Path, watchdog: Watchdog, python_program):
    """It left the group, cleared its environment, and keeps the output pipe open: the wait is bounded."""
    command = python_program("""
        import subprocess, sys
        daemon = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
        subprocess.Popen([sys.executable, "-S", "-c", daemon], start_new_session=True, env={})
    """)
    async with asyncio.timeout(100), running(command, tmp_path, watchdog) as process:
        await process.wait()
        await eventually(lambda: bool((tmp_path / "agent.log").read_text()))

    os.kill(int((tmp_path / "agent.log").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("env", "workdir"), [({"PATH": "a\0b"}, "."), ({"TOO_LARGE": "x" * (1 << 22)}, "."), ({}, "no/such/directory")]
)
async def test_a_process_that_cannot_be_made_leaves_nothing(tmp_path: Path, watchdog: Watchdog, env, workdir):
    open_files = psutil.Process().num_fds()
    with AgentLog(tmp_path / "agent.log") as log, pytest.raises((OSError, ValueError)):
        await AgentProcess.start(("true",), env=env, workdir=tmp_path / workdir, log=log, watchdog=watchdog)

    await eventually(lambda: psutil.Process().num_fds() <= open_files)


@pytest.mark.parametrize("left", range(12))
async def test_an_agent_for_which_no_descriptor_is_left(tmp_path: Path, watchdog: Watchdog, left: int):
    """Whichever of them is the one that is missing: the start fails, and gives back those that it had."""
    open_files = psutil.Process().num_fds()
    with AgentLog(tmp_path / "agent.log") as log, only_descriptors(left), suppress(OSError):
        process = await AgentProcess.start(("true",), env=ENV, workdir=tmp_path, log=log, watchdog=watchdog)
        await process.stop(grace_s=20)

    await eventually(lambda: psutil.Process().num_fds() <= open_files)


@contextmanager
def only_descriptors(number: int) -> Iterator[None]:
    """In the block this process can open so many descriptors and no more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as taken:
        resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 64, limits[1]))
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        free = []
        with suppress(OSError):
            while True:
                free.append(os.dup(0))
        for descriptor in free[:number]:
            os.close(descriptor)
        for descriptor in free[number:]:
            taken.callback(os.close, descriptor)
        yield


@pytest.fixture(name="adopts_orphans")
def _adopts_orphans() -> Iterator[None]:
    """This process gets the orphans of its agents, as the first process of a container does."""
    subreaper = 36  # PR_SET_CHILD_SUBREAPER
    libc = ctypes.CDLL(None)
    assert libc.prctl(subreaper, 1, 0, 0, 0) == 0
    yield
    libc.prctl(subreaper, 0, 0, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")
@pytest.mark.usefixtures("adopts_orphans")
async def test_orphans_are_reaped(tmp_path: Path, watchdog: Watchdog):
    """None is waited for as if it ran, none stays a zombie; the deadline is a small part of the grace period."""
    others = zombies()
    async with asyncio.timeout(60):
        async with running(("/bin/sh", "-c", "sleep 300 & sleep 300 &"), tmp_path, watchdog, grace_s=600) as process:
            await process.wait()

    assert zombies() <= others


def zombies() -> set[psutil.Process]:
    """Children of this process that have ended and that nobody has waited for, those of other tests included."""
    return {child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_zombie_is_left_of_a_group_that_is_gone():
    """It may end between two looks at it: without the last look, most of these do."""
    for _ in range(30):
        group = os.posix_spawn("/bin/sh", ("sh", "-c", "sleep 0.01 & wait"), ENV, setpgroup=0)
        while not is_gone(group):
            pass
        with pytest.raises(ChildProcessError):
            os.waitpid(-group, os.WNOHANG)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_zombies_of_a_parent_that_waits_for_nobody_count_as_gone(
    tmp_path: Path, watchdog: Watchdog, python_program
):
    """They can be signaled for ever; the deadline is a small part of the grace period."""
    command = python_program("""
        import os, time
        group = os.getpgrp()
        ready, tell = os.pipe()
        if nanny := os.fork():
            os.read(ready, 1)
            print(nanny, flush=True)
        else:
            os.setpgid(0, 0)
            child = os.fork()
            if child == 0:
                os.setpgid(0, group)
                os._exit(0)
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            os.write(tell, b"x")
            os.closerange(0, 3)
            time.sleep(300)
    """)
    async with asyncio.timeout(60):
        async with running(command, tmp_path, watchdog, grace_s=600) as process:
            await process.wait()
            zombies = [each for each in psutil.process_iter() if is_zombie_of(each, process.group)]

    os.kill(int((tmp_path / "agent.log").read_text()), signal.SIGKILL)
    assert len(zombies) == 1


def is_zombie_of(process: psutil.Process, group: int) -> bool:
    """Whether it has ended, nobody has waited for it, and it belonged to `group`."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False
