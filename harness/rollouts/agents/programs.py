"""Agent programs with a PEP 723 header, run in an environment of their own.

`uv` builds the environment that the header asks for, once and from its cache afterwards; the agent is then started
with that environment's interpreter, so the agent itself is the process that is watched and killed. Preparing the
same script several times at once is safe: uv locks the environment.
"""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import uv

from harness.errors import AgentError
from harness.rollouts.agents.bundled import bundled_directory
from harness.rollouts.agents.task import ProgramAgent

_PREPARE_DEADLINE_S = 300.0
_ERROR_TAIL_LINES = 15


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
    path = _existing(script)
    try:
        async with asyncio.timeout(deadline_s):
            await _run_uv("sync", "--quiet", "--script", path)
            interpreter = await _run_uv("python", "find", "--script", path)
    except TimeoutError as error:
        raise AgentError(f"the environment of {path} was not ready within {deadline_s:g} s") from error
    return ProgramAgent(name or script.parent.name, (interpreter, path))


def _existing(script: Path) -> str:
    if not script.is_file():
        raise AgentError(f"no agent script at {script}")
    return str(script.absolute())


async def _run_uv(*arguments: str) -> str:
    """What uv printed, stripped; `AgentError` with the end of its messages when it failed."""
    process = await asyncio.create_subprocess_exec(
        uv.find_uv_bin(),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},  # ours is not the script's
        start_new_session=True,
    )
    try:
        output, messages = await process.communicate()
    finally:
        await _end(process)
    if process.returncode:
        tail = "\n".join(messages.decode(errors="replace").splitlines()[-_ERROR_TAIL_LINES:])
        raise AgentError(f"uv {' '.join(arguments)} failed with exit code {process.returncode}:\n{tail}")
    return output.decode().strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Nothing of uv is left, its build processes included."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()
