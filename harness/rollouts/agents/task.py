"""The input of a rollout: an agent and its task."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ScenarioError
from harness.rollouts.sandboxes.sandbox import BWRAP, CONTAINERS, NONE, Sandbox, StartOnHost
from harness.sessions.session_config import Inheritance
from harness.types import Json, Message

if TYPE_CHECKING:
    from harness.rollouts.sandboxes.spec import SandboxSpec

AgentFunction = Callable[..., Awaitable[dict[str, Any] | None]]
"""`async def run(base_url, prompt, request_kwargs, metadata, **kwargs) -> dict | None`; `base_url` ends in `/v1`.

`request_kwargs` has the model's name. `kwargs` are `session_id`, `api_key` and the `FunctionAgent`'s. Adapters trust a
reward of a function, the trainer's own code, but not of a program.
"""

AbortFunction = Callable[..., Awaitable[None]]
"""`async def abort(session_id, metadata, **kwargs) -> None`: asks one rollout's agent to end."""

AfterAgent = Callable[[Sandbox, StartOnHost], Awaitable[None]]
"""Uses the sandbox of an agent that has ended, such as to verify what it did. Raises `SandboxFailed`."""


@dataclass(frozen=True, slots=True)
class ProgramAgent:
    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    home: Mapping[str, str] | None = None
    """Files of each rollout's own home directory, by path, deleted afterwards. `${NAME}` in them, `env` and `command`
    is then a variable of the environment. None: the user's home directory, no expansion.
    """
    session: Json = field(default_factory=dict)
    """Session settings that `AgentTask.session` overrides."""
    key_in_environment: bool = True
    """False if only its files and command may hold the session's key and address."""
    setup: tuple[str, ...] = ()
    """Command that runs before the agent, which starts only if it succeeds."""
    cwd: str = ""
    """Working directory, relative to the rollout's and created if missing."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files and folders to copy, by their target paths."""
    folders: tuple[Path, ...] = ()
    """Folders of its installation, which a sandbox shows read-only."""
    sandbox: "SandboxSpec | None" = None
    """Sandbox of its rollouts. None: it runs as a process of the user's."""


@dataclass(frozen=True, slots=True)
class FunctionAgent:
    """An agent that is an async function in this process."""

    name: str
    run: AgentFunction
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    abort: AbortFunction | None = None
    """Called for each aborted rollout, for agents that run elsewhere."""


Agent = ProgramAgent | FunctionAgent


@dataclass(frozen=True, slots=True)
class AgentTask:
    agent: Agent
    prompt: str | Sequence[Message]
    """Instruction, or first messages. Programs get messages as a JSON file (`HARNESS_MESSAGES_FILE`)."""
    workdir: Path
    """The rollout's own directory for inputs, `agent.log` and `result.json`."""
    model: str
    deadline_s: float = 600.0
    session: Json = field(default_factory=dict)
    """Body of `POST /sessions`. Its `metadata` take precedence over the task's."""
    request_kwargs: Json = field(default_factory=dict)
    """Arguments for functions; a JSON file for programs (`HARNESS_REQUEST_KWARGS_FILE`)."""
    metadata: Json = field(default_factory=dict)
    resumes: str | None = None
    """Session of a rollout aborted with `Keep.SESSIONS`, to continue from."""
    inherits: Inheritance | None = None
    """Earlier session to resume or fork; see `SessionManager.resume` and `fork`."""
    resume_attempts: int = 0
    """Times that the agent starts again after a failure of its infrastructure, each with the record of the last life.
    `deadline_s` covers all lives. Each has `workdir`; an earlier life's is renamed to `WORKDIR-life-N`.
    """
    cwd: Path | None = None
    """Working directory of a program, if not one in `workdir`. The harness never writes there."""
    terminal: Path | None = None
    """Terminal of a program, in place of its log."""
    on_output: Callable[[bytes], None] | None = None
    """Called with all output, also what the log leaves out."""
    sandbox: "SandboxSpec | None" = None
    """Sandbox of this rollout, if not the agent's."""
    after: AfterAgent | None = None
    """Called in the sandbox after the agent, unless the rollout was ended from outside."""

    @property
    def box(self) -> "SandboxSpec | None":
        """The sandbox to use; None for none."""
        spec = self.sandbox
        if spec is None and isinstance(self.agent, ProgramAgent):
            spec = self.agent.sandbox
        return None if spec is None or spec.kind == NONE else spec

    @property
    def session_fields(self) -> Json:
        """`session` over the settings of its agent."""
        return {**(self.agent.session if isinstance(self.agent, ProgramAgent) else {}), **self.session}

    @property
    def instruction(self) -> str | None:
        """The prompt as one text; None for other messages than a user text."""
        if isinstance(self.prompt, str):
            return self.prompt
        match self.prompt:
            case [{"role": "user", "content": str(text)}]:
                return text
        return None

    def require_valid(self) -> None:
        """Raise `ScenarioError` if the task is no JSON, holds a lone surrogate, or has no such sandbox."""
        if self.box is not None:
            if not isinstance(self.agent, ProgramAgent):
                raise ScenarioError("sandbox: expected a program, got a function, which runs in this process")
            if self.box.kind in CONTAINERS and self.box.image is None:
                raise ScenarioError(f"sandbox.image: expected an image for {self.box.kind}, got none")
            shown = (self.workdir.absolute(), *(Path(mount.target) for mount in self.box.shown))
            is_shown = self.cwd is None or any(self.cwd.absolute().is_relative_to(each) for each in shown)
            if self.box.kind == BWRAP and not is_shown:
                raise ScenarioError(f"sandbox.mounts: expected one with the directory {self.cwd}, got none")
            if self.terminal is not None and self.box.kind != BWRAP:
                raise ScenarioError(f"sandbox: expected no --interactive with {self.box.kind}")
            from harness.rollouts.sandboxes.boxed import factory_of  # few trainers use sandboxes, which need pydantic

            factory_of(self.box)
        parts = {"prompt": self.prompt, "session": self.session, "metadata": self.metadata}
        for name, part in parts.items():
            try:
                # JSON escapes and file names can hold lone surrogates, which UTF-8 cannot.
                json.dumps(part, ensure_ascii=False).encode()
            except TypeError as error:
                raise ScenarioError(f"{name}: expected JSON: {error}") from error
            except UnicodeEncodeError as error:
                raise ScenarioError(f"{name}: expected text, got a lone surrogate: {error}; replace it") from error
