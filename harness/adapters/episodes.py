"""Rollouts for trainers that create a plug-in per call and never signal the end."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from harness.adapters.agents import Program, find_function, find_program, is_program, program_metadata, stamp_stated
from harness.adapters.sampling import session_sampling
from harness.adapters.trainer_sessions import ADMIN_TOKEN_VARIABLE, TrainerSessions, TrainerSettings, rollout_directory
from harness.errors import AdapterError
from harness.rollouts.agents.task import AgentFunction, FunctionAgent, ProgramAgent
from harness.rollouts.client.connections import SessionServerAddress
from harness.samples.delivery import Selection
from harness.samples.rollout import Rollout
from harness.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings(TrainerSettings):
    agent: AgentFunction | str
    """Function, dotted path, bundled program, script, profile or command line."""
    trust_agent_result: bool = False
    """True if a program's result may state the reward."""

    @classmethod
    def read(
        cls,
        session_server: str,
        agent: AgentFunction | str,
        *,
        agent_env: Mapping[str, str] | None = None,
        matching: Sequence[str] | None = None,
        workdir: str | None = None,
        **others: Any,
    ) -> Self:
        """Build settings; `others` are fields. Raises `AdapterError` for a missing agent."""
        settings = cls(
            server=SessionServerAddress(session_server, os.environ.get(ADMIN_TOKEN_VARIABLE)),
            agent=agent,
            agent_env=tuple(sorted((agent_env or {}).items())),
            matching=None if matching is None else tuple(matching),
            workdir=None if workdir is None else Path(workdir),
            **others,
        )
        if settings.runs_program or not settings.agent_env:
            return settings
        raise AdapterError("agent_env: a function has no environment of its own; it is for programs")

    def require_trusted(self, instead: str) -> None:
        """Raise `AdapterError` for a program whose result is not trusted."""
        if self.runs_program and not self.trust_agent_result:
            raise AdapterError(
                "agent: the model can write a program's result, so it states no reward;"
                f" {instead}, or set trust_agent_result=True"
            )

    @property
    def runs_program(self) -> bool:
        """True unless the agent is a function. Raises `AdapterError`."""
        return not callable(self.find_agent())

    def find_agent(self) -> Program | AgentFunction:
        """Return the program or function. Raises `AdapterError`."""
        if not isinstance(self.agent, str):
            return self.agent
        if is_program(self.agent):
            return find_program(self.agent, "agent")
        return find_function(self.agent, "agent", _import)


class Episodes:
    """Rollouts of one loop with equal settings."""

    def __init__(self, settings: EpisodeSettings) -> None:
        self._settings = settings
        self.sessions = TrainerSessions(settings, settings.find_agent)

    async def run(
        self,
        prompt: str | Sequence[Message],
        metadata: Mapping[str, Any],
        sampling_params: Mapping[str, Any],
        most_tokens: int | None,
        selection: Selection | None = Selection.ONE,
    ) -> Rollout:
        """Run one rollout to its end.

        `metadata` is a row of the data set, of which a program gets only the items in its `agent` object. Parameters
        have SGLang's names. Without `selection`, the agent profile's counts.

        Raises `AdapterError` for unsupported parameters, and as `TrainerSessions.open`.
        """
        sampling = session_sampling(sampling_params)
        manager, agent = await self.sessions.open()
        is_program = isinstance(agent, ProgramAgent)
        player = agent if isinstance(agent, ProgramAgent) else _with_metadata(agent, metadata)
        known = program_metadata(metadata, "data") if is_program else {}
        async with rollout_directory(self._settings.workdir, uuid4().hex) as workdir:
            task = self._settings.make_task(
                player, prompt, workdir, known, sampling=sampling, most_tokens=most_tokens, selection=selection
            )
            rollout = await manager.run(task)
        return rollout if is_program and not self._settings.trust_agent_result else stamp_stated(rollout)

    async def close(self) -> None:
        """Close manager and connection. Idempotent."""
        await self.sessions.close()


# Plug-ins of one loop with equal settings share a manager and a connection.
_open: dict[tuple[asyncio.AbstractEventLoop, EpisodeSettings], Episodes] = {}


def episodes_of(
    settings: EpisodeSettings, register_end: Callable[[Callable[[], Awaitable[None]]], None] | None = None
) -> Episodes:
    """Return the loop's episodes. `register_end` gets their cleanup function."""
    for place in [place for place in _open if place[0].is_closed()]:
        del _open[place]
    place = (asyncio.get_running_loop(), settings)
    if place not in _open:
        _open[place] = Episodes(settings)
        if register_end is not None:
            register_end(_open[place].close)
    return _open[place]


async def close_episodes() -> None:
    """Close the running loop's episodes. Idempotent."""
    loop = asyncio.get_running_loop()
    for place in [place for place in _open if place[0] is loop]:
        await _open.pop(place).close()


def _with_metadata(function: AgentFunction, metadata: Mapping[str, Any]) -> FunctionAgent:
    # A row may hold anything, while a session's own metadata may not.
    async def run(**given: Any) -> dict[str, Any] | None:
        return await function(**{**given, "metadata": dict(metadata)})

    return FunctionAgent("agent", run)


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
