"""A program in a sandbox: its files of this machine, and its variables.

A box shows a named file without its folder: beside an agent's script may lie a check and its answers.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.rollouts.agents.agent_environment import USER_FOLDERS, home_of
from harness.rollouts.agents.task import AgentTask, ProgramAgent

_SYSTEM = tuple(map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/dev", "/proc", "/sys")))
OUR_PYTHON = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")


def find_programs(agent: ProgramAgent) -> list[Path]:
    """Return the paths that `agent` and the relay's client need beside the system."""
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
