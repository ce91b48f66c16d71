"""Agent programs with a PEP 723 header, run in an environment of their own.

`uv` builds the environment that the header asks for, once and from its cache afterwards; the agent is then started
with that environment's interpreter, so the agent itself is the process that is watched and killed. Preparing the
same script several times at once is safe: uv locks the environment.
"""

import asyncio
from pathlib import Path

from harness.errors import AgentError
from harness.machine.uv import run_uv
from harness.rollouts.agents.bundled import bundled_directory
from harness.rollouts.agents.task import ProgramAgent

_PREPARE_DEADLINE_S = 300.0


def bundled_agent(name: str) -> Path:
    """The script of the agent `name` that ships with the harness."""
    scripts = {path.parent.name: path for path in bundled_directory("agents").glob("*/agent.py")}
    if name not in scripts:
        raise AgentError(f"no bundled agent {name!r}; there are {', '.join(sorted(scripts))}")
    return scripts[name]


async def prepare_agent(
    script: Path, *, name: str | None = None, deadline_s: float = _PREPARE_DEADLINE_S
) -> ProgramAgent:
    """An agent that runs `script` in the environment of its header; its default name is that of its folder."""
    path = _require_script(script)
    try:
        async with asyncio.timeout(deadline_s):
            await run_uv("sync", "--quiet", "--script", path, deadline_s=None, failure=AgentError)
            interpreter = await run_uv("python", "find", "--script", path, deadline_s=None, failure=AgentError)
    except TimeoutError as error:
        raise AgentError(f"the environment of {path} was not ready within {deadline_s:g} s") from error
    return ProgramAgent(name or script.parent.name, (interpreter, path))


def _require_script(script: Path) -> str:
    if not script.is_file():
        raise AgentError(f"no agent script at {script}")
    return str(script.absolute())
