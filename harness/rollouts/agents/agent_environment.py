"""The environment and files of an agent process, without secrets of the harness.

A sandbox shows a named file of this machine without its folder: beside an agent's script may lie a check and its
answers.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from harness.credentials import without_credentials
from harness.dialects.dialect import DIALECTS, Dialect
from harness.errors import ScenarioError
from harness.machine.disk import make_way, make_way_below
from harness.machine.program import for_programs
from harness.rollouts.agents.profile import expand
from harness.rollouts.agents.task import AgentTask, ProgramAgent
from harness.rollouts.client.session_server import SessionHandle
from harness.types import Json

INSTRUCTION_FILE = "instruction.md"
MESSAGES_FILE = "messages.json"
METADATA_FILE = "metadata.json"
REQUEST_KWARGS_FILE = "request_kwargs.json"
RESULT_FILE = "result.json"
LOG_FILE = "agent.log"
HOME = ".home"
"""Home directory of an agent with its own."""

MAX_VARIABLE_BYTES = 64 * 1024
"""Longer values are passed by file only. Linux refuses 128 KiB."""

_PREFIXES = ("UV_", "PIP_")
USER_FOLDERS = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
"""Variables that locate the user's files."""
_SYSTEM = tuple(map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/dev", "/proc", "/sys")))
OUR_PYTHON = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
_SECRET = re.compile(r"TOKEN|USERNAME|PASSWORD|SECRET|CREDENTIAL|AUTH|_KEY$")


def agent_environment(
    agent: ProgramAgent,
    task: AgentTask,
    session: SessionHandle,
    parent: Mapping[str, str],
    dialects: Sequence[Dialect] = DIALECTS,
) -> dict[str, str]:
    exempt = (parent.get("no_proxy") or parent.get("NO_PROXY"), urlsplit(session.base_url).hostname)
    no_proxy = ",".join(filter(None, exempt))
    workdir = task.workdir.absolute()
    package_indexes = {
        name: value for name, value in parent.items() if name.startswith(_PREFIXES) and not _SECRET.search(name)
    }
    variables = {
        # The parent's environment is not inherited, because it holds API keys. A short list of variables passes, with
        # credentials removed from URLs. The session's and the agent's variables pass unchanged.
        **without_credentials({**for_programs(parent), **package_indexes}),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        **client_variables(session, task.model, dialects),
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
        **_prompt_variables(task, workdir),
        "HARNESS_RESULT_FILE": str(workdir / RESULT_FILE),
        **_object_variables("HARNESS_REQUEST_KWARGS", workdir / REQUEST_KWARGS_FILE, task.request_kwargs),
        **_object_variables("HARNESS_METADATA", workdir / METADATA_FILE, task.metadata),
    }
    if agent.home is None:
        return {**variables, **agent.env}
    # Otherwise the agent would use the configuration that the user has for the same agent.
    for name in USER_FOLDERS:
        variables.pop(name, None)
    variables["HOME"] = str(home_of(task))
    return with_expanded(variables, agent.env)


def client_variables(session: SessionHandle, model: str, dialects: Sequence[Dialect] = DIALECTS) -> dict[str, str]:
    """Return the variables that point clients at `session`."""
    told = (dialect.client_variables(session.base_url, session.api_key, model) for dialect in dialects)
    found = {name: value for variables in told for name, value in variables.items()}
    return {**found, "HARNESS_MODEL": model, "HARNESS_SESSION_ID": session.session_id}


def without_session(variables: Mapping[str, str], session: SessionHandle) -> dict[str, str]:
    """Return `variables` without those that hold the session's id, key or address."""
    told = {session.session_id, session.api_key}
    return {name: value for name, value in variables.items() if value not in told and session.base_url not in value}


def with_expanded(variables: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` and `more`, whose values may reference earlier ones. Raises `ValueError`."""
    result = dict(variables)
    for name, value in more.items():
        result[name] = expand(value, result)
    return result


def home_of(task: AgentTask) -> Path:
    return task.workdir.absolute() / HOME


def prepare_home(files: Mapping[str, str], task: AgentTask, variables: Mapping[str, str]) -> None:
    """Create a new home directory for the rollout."""
    home = home_of(task)
    make_way(home)
    home.mkdir(mode=0o700)
    write_home(files, home, variables)


def claim_home(home: Path) -> None:
    """Create `home` for its owner only. Raises `ScenarioError` if it is not empty."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        is_empty = not any(home.iterdir())
        if is_empty:
            home.chmod(0o700)
    except OSError as error:
        raise ScenarioError(f"{home} cannot be the home directory of an agent: {error}") from error
    if not is_empty:
        raise ScenarioError(
            f"{home} exists and is not empty; expected a directory to be made for the agent: name another"
        )


def write_home(files: Mapping[str, str], home: Path, variables: Mapping[str, str]) -> None:
    """Write `files` into `home`, with `variables` escaped as in JSON."""
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(expand(text, variables, escaped=True), encoding="utf-8")


def prepare_workdir(task: AgentTask) -> None:
    """Write the task's files and copy the agent's, and remove an earlier attempt's result. Raises `OSError`."""
    workdir = task.workdir
    workdir.mkdir(parents=True, exist_ok=True)
    files = {METADATA_FILE: json.dumps(task.metadata)}
    if task.instruction is not None:
        files[INSTRUCTION_FILE] = task.instruction
    if not isinstance(task.prompt, str):
        files[MESSAGES_FILE] = json.dumps(task.prompt)
    if isinstance(task.agent, ProgramAgent):  # a function is called with them, and may have any objects among them
        files[REQUEST_KWARGS_FILE] = json.dumps(task.request_kwargs)
    for name, text in files.items():
        # An earlier rollout's agent may have left a link that leads out of its sandbox, or a pipe that blocks.
        make_way_below(workdir, name).write_text(text, encoding="utf-8")
    for name in (RESULT_FILE, LOG_FILE):
        make_way(workdir / name)
    if isinstance(task.agent, ProgramAgent):
        _copy_files(task.agent, workdir)


def _copy_files(agent: ProgramAgent, workdir: Path) -> None:
    for name, source in agent.files.items():
        target = make_way_below(workdir, name)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target)
    (workdir / agent.cwd).mkdir(parents=True, exist_ok=True)


def _prompt_variables(task: AgentTask, workdir: Path) -> dict[str, str]:
    variables: dict[str, str] = {}
    instruction = task.instruction
    if instruction is not None:
        variables["HARNESS_INSTRUCTION_FILE"] = str(workdir / INSTRUCTION_FILE)
        # Linux refuses longer variables, and no variable can hold a NUL.
        if len(instruction.encode()) <= MAX_VARIABLE_BYTES and "\0" not in instruction:
            variables["HARNESS_INSTRUCTION"] = instruction
    if not isinstance(task.prompt, str):
        variables["HARNESS_MESSAGES_FILE"] = str(workdir / MESSAGES_FILE)
    return variables


def _object_variables(name: str, file: Path, value: Json) -> dict[str, str]:
    variables = {f"{name}_FILE": str(file)}
    text = json.dumps(value)
    if len(text) <= MAX_VARIABLE_BYTES:
        variables[name] = text
    return variables


def find_programs(agent: ProgramAgent) -> list[Path]:
    """Return the paths that `agent` and the relay's client need besides the system."""
    words = [Path(word) for word in agent.command if word.startswith("/") and Path(word).is_file()]
    pythons = (OUR_PYTHON, *(folder / "bin" / "python" for folder in agent.folders), *words)
    paths = [*agent.folders, *words, *(found for python in pythons for found in _installation(python))]
    found = [path for path in dict.fromkeys(paths) if path.exists() and not _is_of_system(path)]
    return [path for path in found if not any(path != other and path.is_relative_to(other) for other in found)]


def boxed_environment(env: Mapping[str, str], agent: ProgramAgent, task: AgentTask) -> dict[str, str]:
    """Return `env` with a home of the rollout's own, and without what only this machine's system has."""
    foreign = {"TMPDIR", *(USER_FOLDERS if agent.home is None else ())}
    if task.box is not None and task.box.image is not None and "PATH" not in agent.env:
        foreign.add("PATH")  # the image has one
    return {"HOME": str(home_of(task)), **{name: value for name, value in env.items() if name not in foreign}}


def _installation(program: Path) -> Iterator[Path]:
    """Yield the prefixes of a Python and of those that its link leads to."""
    for _ in range(8):
        if _is_of_system(program):
            return
        prefix = program.parent.parent
        is_python = (prefix / "pyvenv.cfg").exists() or next(prefix.glob("lib/python3*/os.py"), None) is not None
        if program.parent.name == "bin" and is_python:
            yield prefix
        elif program.is_file():
            yield program
        if not program.is_symlink():
            return
        program = Path(os.path.normpath(program.parent / program.readlink()))


def _is_of_system(path: Path) -> bool:
    # Where /bin is a link to /usr/bin, the root is the prefix of the system's Python.
    return path == Path("/") or any(path.is_relative_to(folder) for folder in _SYSTEM)
