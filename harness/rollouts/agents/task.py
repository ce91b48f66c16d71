"""The input of a rollout: an agent, program or function, and its task."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import ScenarioError
from harness.types import Json, Message

AgentFunction = Callable[..., Awaitable[dict[str, Any] | None]]
"""`async def run(base_url, prompt, request_kwargs, metadata, **kwargs) -> dict | None`; `base_url` ends in `/v1`.

`prompt` is that of the `AgentTask`; `request_kwargs` carries the model's name; `kwargs` are `session_id`, `api_key` and
those of the `FunctionAgent`. The function is the trainer's own code: where adapters take a reward from the agent's
result, they trust that of a function, and not that of a program.
"""


AbortFunction = Callable[..., Awaitable[None]]
"""`async def abort(session_id, metadata, **kwargs) -> None`: asks the agent of one running rollout to end.

`kwargs` are those of the `FunctionAgent`.
"""


@dataclass(frozen=True, slots=True)
class ProgramAgent:
    """An agent that is a program."""

    name: str
    command: tuple[str, ...]
    """Program and arguments."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the process."""
    home: Mapping[str, str] | None = None
    """Files of a home directory that each rollout has of its own, by their paths in it; it goes when the agent has
    ended. `${NAME}` in them, in `env` and in `command` then stands for a variable of the environment. None: the home
    directory is the user's, and everything is taken as it is."""
    session: Json = field(default_factory=dict)
    """What its sessions are created with, unless the task says otherwise (`AgentTask.session`)."""
    key_in_environment: bool = True
    """False: variables that hold the key or the address of its session are for its files and its command alone."""


@dataclass(frozen=True, slots=True)
class FunctionAgent:
    """An agent that is an async function in this process."""

    name: str
    run: AgentFunction
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    abort: AbortFunction | None = None
    """Called for each of its running rollouts when they are aborted; for agents that run elsewhere."""


Agent = ProgramAgent | FunctionAgent


@dataclass(frozen=True, slots=True)
class AgentTask:
    """One rollout to run."""

    agent: Agent
    prompt: str | Sequence[Message]
    """The instruction, or the messages that a conversation begins with. Functions get it as it is, programs an
    instruction by file and environment variable, messages as a JSON file (`HARNESS_MESSAGES_FILE`)."""
    workdir: Path
    """A directory of this rollout's own: `instruction.md` or `messages.json`, `metadata.json`,
    `request_kwargs.json`, `agent.log`, `result.json`."""
    model: str
    """Model name for the agent's client."""
    deadline_s: float = 600.0
    session: Json = field(default_factory=dict)
    """Body of `POST /sessions`: limits, sampling, after_incomplete, script."""
    request_kwargs: Json = field(default_factory=dict)
    """Passed to function agents, and to programs as a JSON file (`HARNESS_REQUEST_KWARGS_FILE`)."""
    metadata: Json = field(default_factory=dict)
    resumes: str | None = None
    """The session of a rollout that was cut short with `Keep.SESSIONS`: this one goes on from what it has recorded."""
    cwd: Path | None = None
    """Where a program works when not in `workdir`. The harness writes nothing there: it may hold the user's files."""

    @property
    def instruction(self) -> str | None:
        """The prompt as one text; None for messages that are more than a text of the user's."""
        if isinstance(self.prompt, str):
            return self.prompt
        match self.prompt:
            case [{"role": "user", "content": str(text)}]:
                return text
        return None

    def require_text(self) -> None:
        """Raise `ScenarioError` where a part of the task that leaves this process is no JSON or holds a lone surrogate.

        Such a string can be read (JSON escapes it, file names hold it) and cannot be written in UTF-8.
        """
        parts = {"prompt": self.prompt, "session": self.session, "metadata": self.metadata}
        for name, part in parts.items():
            try:
                json.dumps(part, ensure_ascii=False).encode()
            except TypeError as error:
                raise ScenarioError(f"{name}: expected JSON: {error}") from error
            except UnicodeEncodeError as error:
                raise ScenarioError(f"{name}: expected text, got a lone surrogate: {error}; replace it") from error
