"""Agents as programs, each in its own environment: those with a profile, and scripts with a PEP 723 header."""

import asyncio
import os
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from harness.errors import AgentError, HarnessError, ScenarioError
from harness.machine.program import run_uv
from harness.rollouts.agents.install import Say, environment_of, install_agent, search_path
from harness.rollouts.agents.profile import PROFILE_FILE, AgentProfile, closest, files_beside, literal, load_profile
from harness.rollouts.agents.task import ProgramAgent

_PACKAGE = Path(__file__).parents[2]

_PREPARE_DEADLINE_S = 300.0
# The first of these in an agent's folder decides how it starts.
_AGENT_FILES = (PROFILE_FILE, "agent.py")


def bundled_agents() -> list[str]:
    folders = bundled_directory("agents").iterdir()
    return sorted(folder.name for folder in folders if any((folder / name).is_file() for name in _AGENT_FILES))


def bundled_agent(name: str) -> Path:
    """Return the profile or script of a bundled agent. Raises `ScenarioError`."""
    for file in _AGENT_FILES:
        path = bundled_directory("agents") / name / file
        if path.is_file():
            return path
    raise ScenarioError(f"no bundled agent {name!r}; {closest(name, bundled_agents())}")


def bundled_profile(name: str) -> AgentProfile:
    """Return the profile of a bundled agent. Raises `ScenarioError`, also for a script."""
    path = bundled_agent(name)
    if path.name != PROFILE_FILE:
        raise ScenarioError(f"{name} is a script without a profile: it is installed when a scenario plays it")
    return load_profile(path.parent)


async def prepare_profile(profile: AgentProfile, say: Say) -> ProgramAgent:
    """Install and return the agent. Raises `AgentError`, also if its dialect is not served."""
    if not profile.is_served:
        raise AgentError(
            f"{profile.name} speaks {profile.spec.dialect}, which this version of the harness does not serve"
        )
    if profile.spec.install is not None:
        await install_agent(profile, say)
    spec = profile.spec
    return ProgramAgent(
        profile.name,
        with_own_program(profile, spec.command),
        variables_of(profile, os.environ),
        spec.files,
        spec.session.to_json(),
        spec.key_in_environment,
        spec.setup,
        spec.cwd,
        files_beside(profile.folder, spec.workdir_files, str(profile.path)),
        folders_of(profile),
        profile.sandbox,
    )


def folders_of(profile: AgentProfile) -> tuple[Path, ...]:
    """Return the folders of the agent's installation."""
    # Beside a profile of the user's own may lie a scenario's check.
    ours = (profile.folder,) if profile.path.is_relative_to(bundled_directory("agents")) else ()
    if profile.spec.install is None:
        return ours
    return (*ours, environment_of(profile), *search_path(profile))


def with_own_program(profile: AgentProfile, command: Sequence[str]) -> tuple[str, ...]:
    """Return `command` with the absolute path of the agent's own program."""
    folders = os.pathsep.join(map(str, search_path(profile)))
    program = shutil.which(command[0], path=folders)
    if program is None:
        return tuple(command)
    # A Node script must run on the Node of its environment, not on the one in `PATH`.
    with Path(program).open("rb") as file:
        node = shutil.which("node", path=folders) if file.readline(80).rstrip().endswith(b"/env node") else None
    return (*(literal(path) for path in (node, program) if path is not None), *command[1:])


def variables_of(profile: AgentProfile, parent: Mapping[str, str], *, in_front: bool = False) -> dict[str, str]:
    """Return the agent's variables: its folders and `[env]`."""
    ours, machines = list(map(str, search_path(profile))), [parent.get("PATH", os.defpath)]
    # By default its programs come last, so that the model's commands find the machine's.
    path = os.pathsep.join(ours + machines if in_front else machines + ours)
    places = {"PATH": path, "HARNESS_AGENT_FOLDER": str(profile.folder)}
    return {name: literal(value) for name, value in places.items()} | profile.spec.env


def split_command(agent: str) -> list[str]:
    """Split a command line into words. Empty for a bundled agent, a script (`*.py`) or a profile."""
    words = shlex.split(agent)
    is_file = len(words) == 1 and agent.endswith((".py", ".toml"))
    return [] if is_file or agent in bundled_agents() else words


def find_command(words: Sequence[str], folder: Path, copied: Collection[str] = ()) -> tuple[str, ...]:
    """Return a command line with the absolute paths of its program and of files of `folder`, except those `copied`.

    Empty if there is no such program in `folder` or on `PATH`.
    """

    def place(word: str) -> str | None:
        if any(Path(word).is_relative_to(name) for name in copied):
            return word
        # Not `resolve()`: the Python of an environment is a link, and its place tells which environment.
        return str((folder / word).absolute()) if (folder / word).is_file() else None

    program = place(words[0]) or shutil.which(words[0]) if words else None
    return () if program is None else (program, *(place(word) or word for word in words[1:]))


async def prepare_agent(
    script: Path | tuple[str, ...],
    *,
    name: str | None = None,
    deadline_s: float = _PREPARE_DEADLINE_S,
    say: Say = lambda _: None,
) -> ProgramAgent:
    """Return an agent that runs `script`: Python with a PEP 723 header, a profile, any program, or a command line."""
    if not isinstance(script, Path):
        return ProgramAgent(name or Path(script[0]).name, script)
    if script.suffix == ".toml":
        return await prepare_profile(load_profile(script), say)
    path = _require_script(script)
    if script.suffix != ".py":
        return ProgramAgent(name or script.parent.name, (path,))
    try:
        # uv locks the environment, so concurrent preparation is safe. The agent runs on the environment's interpreter,
        # not on uv, so that the agent itself is the watched process.
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


def bundled_directory(name: Literal["agents", "scenarios"], *, package: Path = _PACKAGE) -> Path:
    # In the wheel they are in `harness/_bundled/`, in an editable install next to the package.
    candidates = (package / "_bundled" / name, package.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates)
    raise HarnessError(f"no bundled {name}: looked for {looked}; reinstall the harness")
