"""Every end of an agent in a box has its outcome, and leaves no process, mount, cgroup, folder or container."""

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from harness.errors import Cause
from harness.rollouts.control.abort_report import AbortBudget
from harness.rollouts.manager import SessionManager
from harness.rollouts.sandboxes.boxed import PREFIX
from harness.rollouts.sandboxes.bwrap import groups_named
from tests.sandbox_programs import builds_images
from tests.small_disk import small_disk
from tests.system.sandboxes.conftest import boxed_task

MARK = f"agent-of-a-test-{os.getpid()}-"
FORKS = """
import os, time
for _ in range(400):
    try:
        if os.fork() == 0:
            time.sleep(300)
    except OSError as error:
        raise SystemExit("refused: " + str(error))
raise SystemExit(0)
"""
EATS_MEMORY = "held = []\nwhile True: held.append(bytearray(1 << 20))"
STUBBORN = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
open("started", "w").close()
time.sleep(300)
"""
OBEDIENT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open("obeyed", "w").close(), sys.exit(3)))
open("started", "w").close()
time.sleep(300)
"""
FILLS_TMP = """
import os
try:
    with open("/tmp/full", "wb") as file:
        while True: file.write(bytes(1 << 20))
except OSError as error:
    raise SystemExit(f"{error}")
"""
FILLS_WORKDIR = """
with open("full", "wb", buffering=0) as file:
    while file.write(bytes(1 << 16)): pass
"""


def boxes_of(manager: int | None = None) -> dict[str, list[str]]:
    """Folders, cgroups, mounts and containers of the boxes of a manager's process, of this one by default."""
    ours = f"-{manager or os.getpid()}-"
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if PREFIX in line and ours in line]
    listing = ("podman", "ps", "--all", "--filter", "label=harness.sandbox", "--format", "{{.Names}}")
    containers = subprocess.run(listing, capture_output=True, text=True, check=False, timeout=120).stdout.split()
    return {
        "folders": [path.name for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*{ours}*")],
        "cgroups": [group.name for group in groups_named(PREFIX) if ours in group.name],
        "mounts": mounts,
        "containers": [name for name in containers if ours in name],
    }


def left_of_boxes(manager: int | None = None) -> dict[str, list[str]]:
    """What `boxes_of` finds, and the processes that do not end by themselves."""
    # A container that its engine has lost has a monitor, whose command line names it.
    monitors = processes_with(PREFIX, f"-{manager or os.getpid()}-")
    return {**boxes_of(manager), "processes": [*processes_with(MARK), *staying(monitors)]}


def staying(pids: Sequence[str]) -> list[str]:
    """Those of `pids` that do not end by themselves, as the monitor of a removed container does."""
    found = [each for each in psutil.process_iter() if str(each.pid) in pids]
    return [str(each.pid) for each in psutil.wait_procs(found, timeout=60)[1]]


def processes_with(*marks: str) -> list[str]:
    """Ids of the processes whose command line has all `marks`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
            if all(mark.encode() in line for mark in marks):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


BUDGET = AbortBudget(agents_s=0.2, kill_s=4.0)
OBEYS_S = 30.0
"""Time for an obedient agent, which takes less of it."""
DEADLINE_S = 15.0
"""Also the time that a box and the agent in it may take to start."""
NOTHING = {"folders": [], "cgroups": [], "mounts": [], "containers": [], "processes": []}


@pytest.mark.parametrize(
    ("script", "limits", "outcome", "cause", "word"),
    [
        ("", {}, "no_model_call", Cause.AGENT, "exit code 0"),
        ("raise SystemExit(7)", {}, "crashed", Cause.AGENT, "exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", {}, "crashed", Cause.AGENT, "SIGKILL"),
        (FORKS, {"pids": 64}, "crashed", Cause.AGENT, "exit code 1"),
        (EATS_MEMORY, {"memory_mb": 64}, "sandbox_failed", Cause.HARNESS, "memory limit of 64 MB"),
    ],
    ids=["ends_at_once", "exits", "kills_itself", "forks_without_end", "eats_memory"],
)
async def test_an_agent_that_ends_badly(*, kind, spec_of, run_boxed, script, limits, outcome, cause, word):
    """A limit refuses more; only memory makes the box the one to blame."""
    rollout = await run_boxed(spec_of(kind, **limits), f"{script}\n# {MARK}")
    assert (rollout.outcome.kind, rollout.outcome.cause) == (outcome, cause), rollout.outcome
    assert word in rollout.outcome.detail
    assert left_of_boxes() == NOTHING


@pytest.mark.parametrize(
    ("end", "script"),
    [("deadline", OBEDIENT), ("abort", STUBBORN), ("abort", OBEDIENT), ("cancel", STUBBORN)],
    ids=["deadline-obedient", "abort-stubborn", "abort-obedient", "cancel-stubborn"],
)
async def test_an_agent_that_is_ended(*, kind, spec_of, server, tmp_path, script, end):
    """SIGTERM reaches the agent, SIGKILL what is left, and nothing of it stays."""
    spec, workdir = spec_of(kind), tmp_path / "run" / "1"
    deadline_s = DEADLINE_S if end == "deadline" else 120.0
    task = boxed_task(spec, f"{script}\n# {MARK}", workdir, deadline_s=deadline_s)
    grace_s, budget = (OBEYS_S, replace(BUDGET, kill_s=2 * OBEYS_S)) if script is OBEDIENT else (1.0, BUDGET)
    async with SessionManager(server.url, grace_s=grace_s) as manager, asyncio.timeout(200):
        running = asyncio.create_task(manager.run(task))
        while not (workdir / "started").exists():
            assert not running.done(), running.result().outcome
            await asyncio.sleep(0.02)
        if end == "cancel":
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        elif end == "abort":
            await manager.abort([running], budget=budget)
            assert running.result().outcome.kind == "drained"
        else:
            assert (await running).outcome.kind == "timed_out"
    assert (workdir / "obeyed").exists() == (script is OBEDIENT)
    assert left_of_boxes() == NOTHING


async def test_an_image_that_does_not_exist(spec_of, run_boxed):
    """The harness is to blame, and its reason names the engine's."""
    rollout = await run_boxed(spec_of("podman", image="localhost/harness-test:no-such-image"), "")
    assert (rollout.outcome.kind, rollout.outcome.cause) == ("sandbox_failed", Cause.HARNESS)
    assert "no-such-image" in rollout.outcome.detail
    assert left_of_boxes() == NOTHING


async def test_an_agent_that_kills_its_container(spec_of, run_boxed):
    """All of its processes at once: it is to blame, not the box."""
    rollout = await run_boxed(spec_of("podman"), "import os, time; os.kill(-1, 9); time.sleep(60)")
    assert (rollout.outcome.kind, rollout.outcome.cause) == ("crashed", Cause.AGENT), rollout.outcome
    assert "SIGKILL" in rollout.outcome.detail
    assert left_of_boxes() == NOTHING


@builds_images
async def test_the_user_of_an_image_owns_the_workdir(spec_of, run_boxed):
    """Without a name for it in the sandbox's settings."""
    image = "localhost/harness-test:user"
    told = f"FROM {spec_of('podman').image}\nUSER 1234:99\n"
    subprocess.run(("podman", "build", "--tag", image, "-"), input=told, text=True, check=True, capture_output=True)
    rollout = await run_boxed(spec_of("podman", image=image), "import os; open('f', 'w'); os.mkdir('.home/folder')")
    assert "exit code 0" in rollout.outcome.detail, rollout.outcome


async def test_an_agent_that_fills_its_own_tmp(spec_of, run_boxed):
    """/tmp of bwrap is memory, which has a bound of its own, or the memory limit's."""
    rollout = await run_boxed(spec_of("bwrap", memory_mb=64), FILLS_TMP)
    assert rollout.outcome.kind == "sandbox_failed"
    assert left_of_boxes() == NOTHING


async def test_an_agent_that_fills_its_disk(kind, spec_of, run_boxed, tmp_path):
    """The disk of the rollouts is full: the agent is not to blame."""
    with small_disk(tmp_path / "run", megabytes=4):
        rollout = await run_boxed(spec_of(kind), FILLS_WORKDIR)
    assert (rollout.outcome.kind, rollout.outcome.cause) == ("sandbox_failed", Cause.HARNESS), rollout.outcome
    assert "is full" in rollout.outcome.detail
    assert left_of_boxes() == NOTHING


async def test_a_program_of_the_sandbox_is_missing(spec_of, run_boxed, tmp_path, monkeypatch):
    """No bwrap on PATH: an outcome that says what to install, and not a crash of the agent."""
    spec = spec_of("bwrap")
    monkeypatch.setenv("PATH", str(tmp_path))
    rollout = await run_boxed(spec, "")
    assert (rollout.outcome.kind, rollout.outcome.cause) == ("sandbox_failed", Cause.HARNESS)
    assert "no program bwrap" in rollout.outcome.detail
