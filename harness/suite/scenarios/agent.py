"""The agent of a scenario, ready to play: a program with its environment, or a function in this process.

Programs print into the log of their rollout. A function prints where the harness prints, and there standard output
belongs to the result of the command: for the time of the block everything printed goes to standard error.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import replace

from harness.rollouts.agents.programs import prepare_agent
from harness.rollouts.agents.task import Agent, ProgramAgent
from harness.suite.scenarios.folder import ScenarioFolder


@asynccontextmanager
async def open_agent(folder: ScenarioFolder) -> AsyncIterator[Agent]:
    """Who plays `folder`, for the time of the block.

    Raises `AgentError` when a program's environment cannot be built, `ScenarioError` when a function cannot be loaded.
    """
    if folder.agent_function is not None:
        with redirect_stdout(sys.stderr):
            yield folder.agent_function.load()
        return
    spec = folder.scenario.agent
    game = {"HARNESS_GAME": str(folder.file(spec.game))} if spec.game else {}
    command = folder.agent_command
    program = ProgramAgent(folder.name, command) if command else await prepare_agent(folder.agent_script)
    yield replace(program, env={**program.env, **game, **spec.env})
