"""The table `[agent.sandbox]`: what it accepts, and what it says otherwise."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from harness.errors import ScenarioError
from harness.rollouts.agents.task import AgentTask, FunctionAgent, ProgramAgent
from harness.rollouts.sandboxes.kinds import factory_of
from harness.rollouts.sandboxes.spec import Mount, SandboxSpec


async def play(**_):
    """An agent that is a function."""


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"kind": "chroot"}, "none, bwrap, podman, docker or MODULE:FACTORY"),
        ({"kind": "podman"}, "an image for podman"),
        ({"kind": "bwrap", "image": "x"}, "no image for bwrap"),
        ({"kind": "bwrap", "user": "agent"}, "UID[:GID]"),
        ({"kind": "bwrap", "mounts": ["data"]}, "absolute paths"),
        ({"kind": "bwrap", "mounts": ["/data/../root"]}, "without `..`"),
        ({"kind": "bwrap", "mounts": ["/a:/b:/c"]}, "SOURCE[:TARGET][:rw]"),
        ({"kind": "bwrap", "memory_mb": 1}, "greater than or equal to 16"),
        ({"kind": "bwrap", "pids": "many"}, "integer"),
        ({"network": True}, "a kind beside the other keys"),
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
