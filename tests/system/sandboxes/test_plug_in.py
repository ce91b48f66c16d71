"""A kind of one's own: the seam is enough for a box that the harness does not know."""

import asyncio
from errno import ENOSPC
from pathlib import Path

import pytest

from harness.errors import SandboxFailed
from harness.rollouts.sandboxes.spec import SandboxSpec
from tests.system.sandboxes.test_boxed_agents import CALL, REPORT

CALLS: list[str] = []


class OpenBox:
    """A box without walls, which writes down what it is asked."""

    has_own_network = False

    def __init__(self, spec, place):
        self._user = spec.user
        CALLS.append(f"made for {place.workdir.name}")

    async def start(self):
        """See `Sandbox`."""
        CALLS.append("start")
        if self._user == "nobody":
            raise SandboxFailed("no room for a box")
        if self._user == "late":
            await asyncio.sleep(60)
        if self._user == "full":
            raise OSError(ENOSPC, "no space left")

    async def exec(self, command, *, env, cwd, on_host):
        """See `Sandbox`."""
        CALLS.append("exec")
        return await on_host(command, env, cwd)

    async def find_failure(self):
        """See `Sandbox`."""
        CALLS.append("find_failure")
        return "the box leaks"

    async def stop(self):
        """See `Sandbox`."""
        CALLS.append("stop")


async def test_a_plug_in_is_started_used_and_stopped(run_boxed, tmp_path):
    """Its agent reaches the server as the harness does; only a failed agent's box is asked for a failure."""
    CALLS.clear()
    spec = SandboxSpec(kind=f"{__name__}:OpenBox")
    rollout = await run_boxed(spec, CALL + REPORT)
    assert (rollout.outcome.kind, len(rollout.samples)) == ("finished", 1), rollout.outcome
    assert rollout.agent_result["home"] == str(tmp_path / "run" / "1" / ".home")
    assert CALLS == ["made for 1", "start", "exec", "stop"]
    rollout = await run_boxed(spec, "raise SystemExit(3)")
    assert (rollout.outcome.kind, "the box leaks" in rollout.outcome.detail) == ("sandbox_failed", True)
    assert CALLS[4:] == ["made for 1", "start", "exec", "find_failure", "stop"]


@pytest.mark.parametrize(
    ("user", "word", "deadline_s"),
    [("nobody", "no room for a box", 60), ("late", "expected a sandbox within 5 s", 5), ("full", "no space left", 60)],
)
async def test_a_box_that_cannot_be_made_in_time_has_failed_and_is_stopped_too(run_boxed, user, word, deadline_s):
    """It is not the agent's end, nor the batch's; what a start has begun may have to be removed, and no agent runs."""
    CALLS.clear()
    rollout = await run_boxed(SandboxSpec(kind=f"{__name__}:OpenBox", user=user), "", deadline_s=deadline_s)
    assert (rollout.outcome.kind, word in rollout.outcome.detail) == ("sandbox_failed", True), rollout.outcome
    assert CALLS == ["made for 1", "start", "stop"]


async def test_a_rollout_without_a_sandbox_makes_no_box(run_boxed, tmp_path):
    """As ever."""
    CALLS.clear()
    rollout = await run_boxed(SandboxSpec(), CALL + REPORT)
    assert rollout.outcome.kind == "finished"
    assert Path(rollout.agent_result["home"]) != tmp_path / "run" / "1" / ".home"
    assert CALLS == []
