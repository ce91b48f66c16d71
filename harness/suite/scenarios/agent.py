"""Open a scenario's agent: a program or a function."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import replace

from harness.rollouts.agents.programs import prepare_agent
from harness.rollouts.agents.task import Agent
from harness.rollouts.sandboxes.sandbox import NONE
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
    program = await prepare_agent(folder.agent_command or folder.agent_script, name=folder.name)
    yield replace(
        program,
        env={**program.env, **{name: str(game) for name, game in games.items()}, **spec.env},
        setup=tuple(spec.setup) or program.setup,
        cwd=spec.cwd or program.cwd,
        files={**program.files, **folder.agent_files},
        folders=(*program.folders, *games.values()),
        sandbox=program.sandbox if spec.sandbox.kind == NONE else spec.sandbox,
    )
