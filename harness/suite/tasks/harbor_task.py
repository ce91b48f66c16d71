"""A task in Harbor's format: a folder with `task.toml` and `instruction.md`."""

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationError

from harness.errors import ScenarioError
from harness.rollouts.sandboxes.sandbox import BWRAP, CONTAINERS
from harness.rollouts.sandboxes.spec import SandboxSpec
from harness.types import Json

TASK_FILE = "task.toml"
DOCKERFILE = "Dockerfile"

ORACLE = "oracle"
"""Agent that plays a task's solution."""
PLAYED = {ORACLE: ("/bin/sh", "-c", "/solution/solve.sh"), "nop": ("/bin/sh", "-c", ":")}
"""Agents that call no model, as Harbor names them."""

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(/\S+)\s*$", re.IGNORECASE | re.MULTILINE)
_CANARY = re.compile(r"(?:[^\S\n]*(?:<!--|#)[^\n]*harbor-canary[^\n]*\n?)+(?:[^\S\n]*\n)*")
_SIZE = re.compile(r"([\d.]+)\s*([KMG])B?", re.IGNORECASE)
_MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml")
_REFUSED = (
    *("steps", "agent.user", "verifier.user", "verifier.environment", "verifier.collect"),
    *(f"environment.{name}" for name in ("gpus", "tpu", "healthcheck", "mcp_servers")),
)
"""Keys that nothing here serves, some of which keep the agent from its verifier."""


def _to_megabytes(size: object) -> object:
    form = _SIZE.fullmatch(size) if isinstance(size, str) else None
    return size if form is None else int(float(form[1]) * _MEGABYTES[form[2].upper()])


class _Environment(BaseModel):
    docker_image: str | None = None
    workdir: str | None = Field(default=None, pattern="^/[^:,]*$")
    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    memory_mb: Annotated[int | None, BeforeValidator(_to_megabytes)] = Field(
        default=None, ge=16, validation_alias=AliasChoices("memory_mb", "memory")
    )
    env: dict[str, str] = Field(default_factory=dict)
    os: str = "linux"
    build_timeout_sec: float = 600.0


class _Agent(BaseModel):
    timeout_sec: float | None = None


class _Verifier(BaseModel):
    timeout_sec: float = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: str | None = None


class _Solution(BaseModel):
    env: dict[str, str] = Field(default_factory=dict)


class _TaskFile(BaseModel):
    """Keys of `task.toml` that count here; others are for Harbor."""

    environment: _Environment = _Environment()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    solution: _Solution = _Solution()


@dataclass(frozen=True, slots=True)
class HarborTask:
    directory: Path
    instruction: str
    keys: _TaskFile

    @classmethod
    def load(cls, directory: Path) -> "HarborTask":
        """Read a task. Raises `ScenarioError` if it is wrong or needs what sandboxes here do not give."""
        path = directory / TASK_FILE
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
            keys = _TaskFile.model_validate(data)
            instruction = (directory / "instruction.md").read_text(encoding="utf-8")
        except OSError as error:
            raise ScenarioError(f"{error.filename}: {error.strerror}") from None
        except ValidationError as error:
            [problem, *_] = error.errors()
            key = ".".join(map(str, problem["loc"]))
            raise ScenarioError(f"{path}: {key}: {problem['msg']}, got {problem['input']!r:.60}") from None
        except ValueError as error:
            raise ScenarioError(f"{path}: {error}") from None
        found = _CANARY.match(instruction)  # no agent is to learn it
        task = cls(directory, instruction[found.end() :] if found else instruction, keys)
        if not (directory / "tests/test.sh").is_file():
            raise ScenarioError(f"{directory}: expected tests/test.sh, got none: nothing can be verified")
        if unknown := ", ".join(task._foreign_needs(data)):
            raise ScenarioError(f"{path}: expected a task of one step on Linux, got {unknown}; move it elsewhere")
        return task

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def dockerfile(self) -> Path | None:
        path = self.directory / "environment" / DOCKERFILE
        return path if path.is_file() else None

    @property
    def workdir(self) -> str:
        """Folder in the box where agent and verifier begin: the task's, the last of its Dockerfile, or `/app`."""
        found = [] if self.dockerfile is None else _WORKDIR.findall(self.dockerfile.read_text(encoding="utf-8"))
        return os.path.normpath(self.keys.environment.workdir or (found[-1] if found else "/app"))

    def image(self, kind: str) -> str:
        """Return the image's name for podman or docker: the task's, or one that its `environment/` determines."""
        if self.keys.environment.docker_image is not None:
            return self.keys.environment.docker_image
        digest = sha256()
        for path in sorted((self.directory / "environment").rglob("*")):
            content = path.read_bytes() if path.is_file() else b""
            digest.update(f"{path.relative_to(self.directory)} {len(content)}\n".encode() + content)
        built = f"harness-task-{digest.hexdigest()[:16]}"
        return f"localhost/{built}" if kind == "podman" else built

    def variables(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """Replace `${NAME}` and `${NAME:-default}` by this process's variables. Raises `ScenarioError`."""
        return {name: _VARIABLE.sub(self._variable, value) for name, value in wanted.items()}

    def _variable(self, match: re.Match[str]) -> str:
        value = os.environ.get(match[1], match[2])
        if value is None:
            raise ScenarioError(f"{self.directory / TASK_FILE}: expected the environment variable {match[1]}, got none")
        return value

    def require_playable(self, agent: str, sandbox: SandboxSpec) -> None:
        """Raise `ScenarioError` if the task lacks what `agent` or `sandbox` needs, or a variable."""
        keys = self.keys
        self.variables(keys.environment.env | keys.verifier.env | (keys.solution.env if agent == ORACLE else {}))
        if agent == ORACLE and not (self.directory / "solution/solve.sh").is_file():
            raise ScenarioError(f"{self.directory}: expected solution/solve.sh for the agent {ORACLE}, got none")
        if sandbox.kind == BWRAP or sandbox.image is not None or keys.environment.docker_image is not None:
            return
        if sandbox.kind not in CONTAINERS:
            raise ScenarioError(f"agent.sandbox.image: expected an image for {sandbox.kind}, which builds none")
        if self.dockerfile is None:
            expected = f"expected environment/{DOCKERFILE} or environment.docker_image, got neither"
            raise ScenarioError(f"{self.directory}: {expected}")

    def _foreign_needs(self, data: Json) -> Iterator[str]:
        environment = self.directory / "environment"
        yield from (name for name in _COMPOSE_FILES if (environment / name).is_file())
        for key in _REFUSED:
            value: Any = data
            for name in key.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            yield from ([key] if value not in (None, 0, [], "") else [])
        yield from ([f"os = {self.keys.environment.os!r}"] if self.keys.environment.os.lower() != "linux" else [])
        yield from (["verifier.environment_mode"] if self.keys.verifier.environment_mode == "separate" else [])


def find_tasks(folder: Path) -> list[Path]:
    """Return the task folders at or below `folder`, sorted by name."""
    if (folder / TASK_FILE).is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{TASK_FILE}"))


class TaskRows:
    """Tasks as rows of a data set: name and instruction."""

    columns = ("text", "metadata")

    def __init__(self, folder: Path) -> None:
        self._folders = find_tasks(folder)
        if not self._folders:
            raise ScenarioError(f"{folder}: expected {TASK_FILE}, or folders that hold one, got none")

    @property
    def files(self) -> list[Path]:
        return [path for folder in self._folders for path in sorted(folder.rglob("*")) if path.is_file()]

    def find(self, name: str) -> HarborTask:
        """Load a task by name. Raises `ScenarioError`."""
        return HarborTask.load(next(folder for folder in self._folders if folder.name == name))

    def load(self, number: int) -> HarborTask:
        return HarborTask.load(self._folders[number])

    def __len__(self) -> int:
        return len(self._folders)

    def scan(self, columns: Collection[str]) -> Iterator[Json]:
        return map(self.read, range(len(self)))

    def read(self, number: int) -> Json:
        task = self.load(number)
        return {"text": task.instruction, "metadata": {"task": task.name}}

    def where(self, number: int) -> str:
        return str(self._folders[number])
