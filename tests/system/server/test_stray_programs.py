"""A program that the model wrote calls the model: nothing of that is trained, and the owner is told.

The agent and its programs are real processes. The strongest program copies all that it can: the client, the system
prompt and the tools of its agent. A relay hides every process, as a machine between them does.
"""

import json
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.engines.scripted import ScriptStep
from harness.rollouts.agents.task import AgentTask, ProgramAgent
from harness.rollouts.manager import SessionManager
from harness.samples.delivery import turn_spans
from harness.samples.rollout import Rollout
from tests.checkout import ROOT
from tests.conformance.clients.witness import Witness
from tests.session_servers.scripted import scripted_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")

PROGRAMS = ROOT / "tests" / "processes"
OF_PROGRAM = "What is rewarded is easily said, and a program says it for ever and ever."
COPY = shlex.join([sys.executable, str(PROGRAMS / "made_program.py")])
CURL = (
    'curl --silent "$OPENAI_BASE_URL/chat/completions" -H "authorization: Bearer $OPENAI_API_KEY"'
    """ -d '{"messages": [{"role": "user", "content": "Say what is easily rewarded."}]}'"""
)


class Played(NamedTuple):
    """A rollout, and the roles of its turns with their evidence."""

    rollout: Rollout
    roles: list[str]
    evidence: list[str]

    @property
    def trained(self) -> set[int]:
        """The turns of which a token is trained."""
        samples = self.rollout.samples
        return {turn for each in samples for turn, span in turn_spans(each) if each.loss_mask[span].any()}


@asynccontextmanager
async def address(*steps: ScriptStep, hides_processes: bool) -> AsyncIterator[str]:
    """Where a server answers, or a relay in front of it."""
    async with scripted_server(*steps) as server:
        if not hides_processes:
            yield server.url
            return
        async with Witness.of(server.url) as relay:
            yield relay.url


async def play(tmp_path: Path, command: str, *, hides_processes: bool = False, **session: str) -> Played:
    """The rollout of an agent whose model has `command` run, which asks once itself."""
    said = json.dumps({"name": "run_shell", "arguments": {"command": command}})
    steps = [f"<tool_call>\n{said}\n</tool_call>", OF_PROGRAM, "All done."]
    if session.get("strays") == "refuse":
        del steps[1]
    agent = ProgramAgent("calling", (sys.executable, str(PROGRAMS / "calling_agent.py")))
    task = AgentTask(agent, "Do it.", tmp_path / "0", "scripted", deadline_s=60, session=session)
    async with (
        address(*(ScriptStep(text=step) for step in steps), hides_processes=hides_processes) as url,
        SessionManager(url) as manager,
    ):
        rollout = await manager.run(task)
    turns = rollout.session["turns"]
    assert turns[-1]["reply"]["content"] == "All done.", (task.workdir / "agent.log").read_text()
    return Played(rollout, [turn["role"] for turn in turns], [turn["evidence"] for turn in turns])


def require_only_the_agent(played: Played) -> None:
    """The program's turn, 1, is dropped as a stray and named; the agent's are trained."""
    session = played.rollout.session
    stray = session["turns"][1]
    assert played.roles == ["main", "stray", "main"], played.evidence
    assert stray["reply"]["content"] == OF_PROGRAM
    assert played.trained == {0, 2}
    assert session["ledger"]["dropped"] == {"stray": stray["output_length"]}
    assert session["ledger"]["generated"] == session["ledger"]["trained"] + stray["output_length"]
    assert any("stray" in remark for remark in session["remarks"]), session["remarks"]


@pytest.mark.parametrize("command", [COPY, CURL], ids=["a copy of the client", "curl"])
async def test_nothing_of_a_program_is_trained(tmp_path: Path, command: str) -> None:
    """It is another program below the agent."""
    played = await play(tmp_path, command)

    require_only_the_agent(played)
    assert "the program" in played.evidence[1]


async def test_without_the_process_another_client_is_caught(tmp_path: Path) -> None:
    """Its headers say that it is none of the agent's, while the agent's tool runs."""
    played = await play(tmp_path, CURL, hides_processes=True)

    require_only_the_agent(played)
    assert "the client" in played.evidence[1]


async def test_without_the_process_a_copy_of_the_client_is_trained(tmp_path: Path) -> None:
    """That remains possible, and `docs/security.md` says so: key and address are best kept from tools."""
    played = await play(tmp_path, COPY, hides_processes=True)

    assert "stray" not in played.roles
    assert 1 in played.trained


async def test_a_program_is_refused_where_strays_are(tmp_path: Path) -> None:
    """Its 403 is what the tool says; the agent continues."""
    played = await play(tmp_path, f"{COPY} 2>&1", strays="refuse")

    assert played.roles == ["main", "main"]
    [*_, result] = played.rollout.session["turns"][1]["messages_delta"]
    assert result["content"].startswith("403 ")
    assert "made_program.py" in result["content"]
