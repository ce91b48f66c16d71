"""Real agents against a real session server whose model says what it is told."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from harness.engines.scripted import ScriptStep
from harness.rollouts.agents.programs import bundled_agent, prepare_agent
from harness.rollouts.agents.task import AgentTask, ProgramAgent
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import Rollout
from tests.session_servers.scripted import scripted_server

RunAgent = Callable[..., Awaitable[Rollout]]


@pytest.fixture(name="workdir")
def _workdir(tmp_path: Path) -> Path:
    return tmp_path / "rollout"


@pytest_asyncio.fixture(name="run_agent")
async def _run_agent(workdir: Path) -> AsyncIterator[RunAgent]:
    """Runs a bundled agent in `workdir` while the model says `steps`."""
    async with AsyncExitStack() as stack:

        async def run(
            name: str, *steps: ScriptStep, prompt: Any = "Let us begin.", env: dict[str, str] | None = None, **task: Any
        ) -> Rollout:
            server = await stack.enter_async_context(scripted_server(*steps))
            manager = await stack.enter_async_context(SessionManager(server.url))
            prepared = await prepare_agent(bundled_agent(name))
            agent = ProgramAgent(name, prepared.command, env or {})
            return await manager.run(AgentTask(agent, prompt, workdir, "scripted", deadline_s=60, **task))

        yield run
