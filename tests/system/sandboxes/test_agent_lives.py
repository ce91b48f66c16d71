"""Unmodified agents that are killed after their fourth call continue in a second life: the list of docs/going-on.md.

`HARNESS_SOAK_BOXES=all` plays all of them.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from harness.rollouts.agents.programs import bundled_profile, prepare_profile
from harness.rollouts.agents.task import AgentTask
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import Rollout
from harness.sessions.ledger import DropReason
from tests.builders import toy_template
from tests.checkout import ROOT
from tests.conformance.agents.parts import GO, IN_TOOL, INSTRUCTION, TOOLS, part_of, turns_of
from tests.conformance.agents.staged_engine import StagedEngine
from tests.session_servers.served import serving_with
from tests.system.sandboxes.conftest import MakeSpec

pytestmark = [pytest.mark.agent, pytest.mark.timeout(900), pytest.mark.xdist_group("agents")]

PATIENCE_S = 200
CALLS = 4
"""Turns of the conversation that the engine has answered when the agent is killed."""
HELD = "let_go"
WAITS = f"while [ ! -e {HELD} ]; do sleep 0.05; done; cat notes.txt"
"""The command of its last call before: it makes no other until it is killed."""

AGENTS = {
    "claude_code": "bwrap",
    "codex": "bwrap",
    "mini_swe_agent": "bwrap",
    "openai_agents": "none",  # its program imports from a folder that a box does not show
    "opencode": "bwrap",
}
"""Their sandboxes."""
PLAYED = AGENTS if os.environ.get("HARNESS_SOAK_BOXES") == "all" else ("mini_swe_agent",)


async def play(name: str, spec_of: MakeSpec, folder: Path) -> Rollout:
    """Run the agent, kill its group after `CALLS` calls, and let its second life end."""
    agent = await prepare_profile(bundled_profile(name), print)
    if AGENTS[name] != "none":
        agent = replace(agent, sandbox=spec_of(AGENTS[name]))
    template, session_id = toy_template(), uuid4().hex
    steps = [*part_of(name).steps]
    steps[CALLS - 1] = TOOLS[name].call(WAITS)
    engine = StagedEngine(part_of(name)._replace(steps=steps), template.tokenizer)
    session = {"session_id": session_id}
    task = AgentTask(agent, INSTRUCTION, folder, "organization/model", PATIENCE_S, session, resume_attempts=1)
    async with (
        serving_with(engine, store=folder.with_name("store.db"), chat_tokenizer=template) as client,
        SessionManager(client.url) as manager,
    ):
        running = asyncio.create_task(manager.run(task))

        async def until(holds: Callable[[], bool]) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while not holds() and not running.done():
                    await asyncio.sleep(0.02)

        await until((folder / IN_TOOL).exists)
        (folder / GO).touch()
        await until(lambda: sum(each.step is not None for each in engine.heard) == CALLS)
        assert manager.signal_agent(session_id, signal.SIGKILL)
        await until(lambda: folder.with_name(f"{folder.name}-life-1").exists() and (folder / IN_TOOL).exists())
        (folder / HELD).touch()
        (folder / GO).touch()
        return await running


@pytest.mark.parametrize("name", PLAYED)
async def test_a_killed_agent_goes_on(name: str, spec_of: MakeSpec, tmp_path: Path) -> None:
    """All its requests repeat, up to the noise of its profile; the rest is sampled."""
    folder = tmp_path / "work"
    rollout = await play(name, spec_of, folder)
    turns, ledger = rollout.session["turns"], rollout.session["ledger"]
    again = [turn for turn in turns if turn["notes"].get("asked_again") and turn["role"] == "main"]
    own = [turn for turn in turns if not turn["notes"].get("inherited") and turn["role"] == "main"]

    assert (rollout.outcome.kind, (folder / "notes.txt").read_text()) == ("finished", "one\ntwo\n")
    assert (len(again), len(again) + len(own)) == (CALLS, turns_of(name))
    assert "diverged" not in own[0]["notes"]
    assert len(rollout.samples) == 1
    assert ledger["generated"] + ledger["inherited"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert DropReason.SUPERSEDED not in ledger["dropped"]
    line = f"- {name} {bundled_profile(name).version}, {AGENTS[name]}"
    assert line in (ROOT / "docs" / "going-on.md").read_text().splitlines()
