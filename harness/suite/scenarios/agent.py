"""Open a scenario's agent: a program or a function."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import replace

from harness.rollouts.agents.programs import prepare_agent
from harness.rollouts.agents.task import Agent, ProgramAgent
from harness.suite.scenarios.folder import ScenarioFolder


@asynccontextmanager
async def open_agent(folder: ScenarioFolder) -> AsyncIterator[Agent]:
    """Yield the agent of `folder`. Raises `AgentError` (environment) or `ScenarioError` (function)."""
    if folder.agent_function is not None:
        # Standard output belongs to the result of the command. Programs print into the log of their rollout.
        with redirect_stdout(sys.stderr):
            yield folder.agent_function.load()
        return
    spec = folder.scenario.agent
    games = {"HARNESS_GAME": folder.file(spec.game)} if spec.game else {}
    command = folder.agent_command
    program = ProgramAgent(folder.name, command) if command else await prepare_agent(folder.agent_script)
    env = {**program.env, **{name: str(game) for name, game in games.items()}, **spec.env}
    yield replace(program, env=env, folders=(*program.folders, *games.values()), sandbox=spec.sandbox)
