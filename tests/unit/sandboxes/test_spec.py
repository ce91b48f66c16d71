"""The table `[agent.sandbox]`: what it accepts, and what it says otherwise."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from harness.errors import ScenarioError
from harness.rollouts.agents.task import AgentTask, FunctionAgent, ProgramAgent
from harness.rollouts.sandboxes.boxed import factory_of
from harness.rollouts.sandboxes.spec import Mount, SandboxSpec


async def play(**_):
    """An agent that is a function."""


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"kind": "chroot"}, "none, bwrap, podman, docker or MODULE:FACTORY"),
        ({"kind": "bwrap", "image": "x"}, "no image for bwrap"),
        ({"kind": "bwrap", "user": "agent"}, "UID[:GID]"),
        ({"kind": "bwrap", "mounts": ["data"]}, "absolute paths"),
        ({"kind": "bwrap", "mounts": ["/data/../root"]}, "without `..`"),
        ({"kind": "bwrap", "mounts": ["/a:/b:/c"]}, "SOURCE[:TARGET][:rw]"),
        ({"kind": "bwrap", "memory_mb": 1}, "greater than or equal to 16"),
        ({"kind": "bwrap", "pids": "many"}, "integer"),
        ({"network": True}, "a kind with the other keys"),
        ({"kind": "bwrap", "disk_mb": 1}, "disk_mb"),
    ],
)
def test_a_wrong_table_is_refused(table, expected):
    """The message names what was expected."""
    with pytest.raises(ValidationError, match=expected.replace("[", r"\[").replace("]", r"\]")):
        SandboxSpec(**table)


def test_mounts_are_read_only_unless_said():
    """`SOURCE`, `SOURCE:TARGET`, and either with `:rw`."""
    spec = SandboxSpec(kind="bwrap", mounts=["/a", "/a:/b", "/a:rw", "/a:/b:rw"])
    a = Path("/a")
    assert spec.shown == (Mount(a, "/a"), Mount(a, "/b"), Mount(a, "/a", True), Mount(a, "/b", True))


@pytest.mark.parametrize("table", [{}, {"kind": "podman", "image": "x", "mounts": ["/a:rw"], "cpus": 1, "pids": 9}])
def test_a_spec_comes_back_from_a_file(table):
    """A run writes its configuration with every default, and reads it when it continues."""
    spec = SandboxSpec(**table)
    written = json.loads(spec.model_dump_json(exclude_none=True))
    assert SandboxSpec(**written) == spec


def test_a_container_needs_an_image():
    """That of a Harbor task is known only when it is built."""
    task = AgentTask(ProgramAgent("a", ("true",), sandbox=SandboxSpec(kind="podman")), "", Path("w"), "m")
    with pytest.raises(ScenarioError, match=r"sandbox\.image: expected an image for podman"):
        task.require_valid()


def test_a_task_fits_its_sandbox():
    """Bwrap shows no other directory than the rollout's and mounts; containers pass no terminal through."""
    agent = ProgramAgent("a", ("true",), sandbox=SandboxSpec(kind="bwrap", mounts=["/data:/mnt"]))
    AgentTask(agent, "", Path("/w"), "m", cwd=Path("/mnt/deep"), terminal=Path("/dev/pts/9")).require_valid()
    with pytest.raises(ScenarioError, match=r"sandbox\.mounts: expected one with the directory /data, got none"):
        AgentTask(agent, "", Path("/w"), "m", cwd=Path("/data")).require_valid()
    container = SandboxSpec(kind="podman", image="x")
    with pytest.raises(ScenarioError, match="expected no --interactive with podman"):
        AgentTask(agent, "", Path("/w"), "m", sandbox=container, terminal=Path("/dev/pts/9")).require_valid()


def test_a_rollouts_sandbox_overrides_its_agents():
    """Also with none."""
    bwrap, podman = SandboxSpec(kind="bwrap"), SandboxSpec(kind="podman", image="x")
    agent = ProgramAgent("a", ("true",), sandbox=bwrap)
    boxes = [AgentTask(agent, "", Path("w"), "m", sandbox=each).box for each in (None, podman, SandboxSpec())]
    assert boxes == [bwrap, podman, None]


def test_what_cannot_be_boxed_is_an_error_of_the_scenario():
    """A function runs in the harness's process; a plug-in has to exist."""
    bwrap = SandboxSpec(kind="bwrap")
    with pytest.raises(ScenarioError, match="expected a program, got a function"):
        AgentTask(FunctionAgent("f", play), "", Path("w"), "m", sandbox=bwrap).require_valid()
    with pytest.raises(ScenarioError, match=r"no\.such\.module:Box cannot be loaded"):
        factory_of(SandboxSpec(kind="no.such.module:Box"))
    assert factory_of(SandboxSpec(kind="pathlib:Path")) is Path
