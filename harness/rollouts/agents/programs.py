"""Agents as programs, each run in an environment of its own: those with a profile, and scripts with a PEP 723 header.

An agent with a `profile.toml` is installed as that says (`install.py`). For a script `uv` builds the environment that
its header asks for, once and from its cache afterwards; the agent is then started with that environment's interpreter,
so the agent itself is the process that is watched and killed. Preparing the same script several times at once is safe:
uv locks the environment.
"""

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import AgentError, ScenarioError
from harness.machine.uv import run_uv
from harness.rollouts.agents.bundled import bundled_directory
from harness.rollouts.agents.install import install_agent, search_path
from harness.rollouts.agents.node import Say
from harness.rollouts.agents.profile import PROFILE_FILE, AgentProfile, closest, literal, load_profile
from harness.rollouts.agents.task import ProgramAgent

_PREPARE_DEADLINE_S = 300.0
_AGENT_FILES = (PROFILE_FILE, "agent.py")
"""The first of them that an agent's folder has says how it is started."""


def bundled_agents() -> list[str]:
    """The names of the agents that ship with the harness."""
    folders = bundled_directory("agents").iterdir()
    return sorted(folder.name for folder in folders if any((folder / name).is_file() for name in _AGENT_FILES))


def bundled_agent(name: str) -> Path:
    """The file that makes `name` an agent: its profile, or its script. Raises `ScenarioError` when there is none."""
    for file in _AGENT_FILES:
        path = bundled_directory("agents") / name / file
        if path.is_file():
            return path
    raise ScenarioError(f"no bundled agent {name!r}; {closest(name, bundled_agents())}")


def bundled_profile(name: str) -> AgentProfile:
    """The profile of a bundled agent. Raises `ScenarioError` when there is no such agent, or it is a script."""
    path = bundled_agent(name)
    if path.name != PROFILE_FILE:
        raise ScenarioError(f"{name} is a script without a profile: it is installed when a scenario plays it")
    return load_profile(path.parent)


async def prepare_profile(profile: AgentProfile, say: Say) -> ProgramAgent:
    """The agent of `profile`, installed. Raises `AgentError` when it cannot be, or its dialect is not served."""
    if not profile.is_served:
        raise AgentError(
            f"{profile.name} speaks {profile.spec.dialect}, which this version of the harness does not serve"
        )
    if profile.spec.install is not None:
        await install_agent(profile, say)
    return ProgramAgent(
        profile.name,
        with_own_program(profile, profile.spec.command),
        variables_of(profile, os.environ),
        profile.spec.files,
        profile.spec.session.to_json(),
        profile.spec.key_in_environment,
    )


def with_own_program(profile: AgentProfile, command: Sequence[str]) -> tuple[str, ...]:
    """`command`, whose program is by its absolute path where it is one of the agent's environment.

    A script for Node runs on the Node of that environment, whichever is on `PATH`.
    """
    folders = os.pathsep.join(map(str, search_path(profile)))
    program = shutil.which(command[0], path=folders)
    if program is None:
        return tuple(command)
    with Path(program).open("rb") as file:
        node = shutil.which("node", path=folders) if file.readline(80).rstrip().endswith(b"/env node") else None
    return (*(literal(path) for path in (node, program) if path is not None), *command[1:])


def variables_of(profile: AgentProfile, parent: Mapping[str, str], *, in_front: bool = False) -> dict[str, str]:
    """The variables that an agent has by its profile: where its own files and programs are, and those of `[env]`.

    On `PATH` its programs come last, so that what a model runs finds those of the machine; `in_front`, first.
    """
    ours, machines = list(map(str, search_path(profile))), [parent.get("PATH", os.defpath)]
    path = os.pathsep.join(ours + machines if in_front else machines + ours)
    places = {"PATH": path, "HARNESS_AGENT_FOLDER": str(profile.folder)}
    return {name: literal(value) for name, value in places.items()} | profile.spec.env


async def prepare_agent(
    script: Path, *, name: str | None = None, deadline_s: float = _PREPARE_DEADLINE_S, say: Say = lambda _: None
) -> ProgramAgent:
    """An agent that runs `script`: Python in the environment of its header, a profile, or a program as it is.

    Its default name is that of its folder.
    """
    if script.suffix == ".toml":
        return await prepare_profile(load_profile(script), say)
    path = _require_script(script)
    if script.suffix != ".py":
        return ProgramAgent(name or script.parent.name, (path,))
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
