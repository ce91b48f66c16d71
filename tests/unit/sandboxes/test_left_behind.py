"""A box is left behind exactly if its manager's process has ended, here."""

import asyncio
import os
import re
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from harness.rollouts.abort_signal import AbortSignal
from harness.rollouts.agents.agent_runner import AgentRunner
from harness.rollouts.agents.task import AgentTask, ProgramAgent
from harness.rollouts.client.session_server import SessionHandle
from harness.rollouts.outcome import Ending
from harness.rollouts.sandboxes.boxed import folder_of, is_left, new_name, remove_left
from harness.rollouts.sandboxes.spec import SandboxSpec
from tests.session_servers.served import eventually


def test_a_box_of_a_process_that_runs_is_not_left():
    """Ours, for one."""
    assert not is_left(new_name())


@pytest.mark.parametrize(
    ("pattern", "other", "expected"),
    [
        (r"-(\d+)-(\d+)-(\w+)$", r"-\1-1-\3", True),  # the id was given to another process
        (r"box-\w{8}", "box-00000000", False),  # of another boot, machine or container
        (r"^harness", "somebody", False),
        (r"\w$", "", False),
    ],
)
def test_other_names(pattern, other, expected):
    """Neither a reused process id nor a name of another make deceives."""
    assert is_left(re.sub(pattern, other, new_name())) is expected


async def test_folders_of_the_dead_are_removed_and_those_of_the_living_stay():
    """The same for a folder that lies beside them."""
    with subprocess.Popen(("true",)) as ended:
        pass
    ours = Path(tempfile.gettempdir()) / new_name()
    dead = ours.with_name(ours.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-"))
    for folder in (ours, dead):
        (folder / "shown").mkdir(parents=True)
    await remove_left(())
    assert not dead.exists()
    assert ours.exists()
    (ours / "shown").rmdir()
    ours.rmdir()


def test_a_folder_leaves_room_for_a_sockets_path(tmp_path, monkeypatch):
    """However long the path of the machine's folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    with socket.socket(socket.AF_UNIX) as listener:
        folder = folder_of(new_name())
        folder.mkdir()
        try:
            listener.bind(str(folder / ("x" * len("shown/relay.sock"))))
        finally:
            shutil.rmtree(folder)


async def test_a_runner_that_closes_during_a_search_stops_its_rollouts(tmp_path, monkeypatch):
    """Not by a deadline, which has not passed, and not by a failed sandbox."""
    engine = tmp_path / "podman"
    engine.write_text(f"#!/bin/sh\n: >{tmp_path}/called\nexec sleep 60\n", encoding="utf-8")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    agent = ProgramAgent("boxed", ("true",), sandbox=SandboxSpec(kind="podman", image="none"))
    task = AgentTask(agent, "Go.", tmp_path / "work", "scripted")
    session = SessionHandle("a" * 32, "http://localhost/sessions/" + "a" * 32, "key")
    runner = AgentRunner(grace_s=1.0)
    running = asyncio.create_task(runner.run(task, session, AbortSignal()))
    await eventually((tmp_path / "called").exists)
    await runner.close()
    assert (await running).end.ending is Ending.STOPPED
