"""One rollout for each call of a trainer that makes a plug-in per call, or per sample, and never says when it ends.

Such a plug-in keeps nothing: everybody in a loop who has the same settings shares one manager and one connection. What
is left of a loop that was closed is forgotten; nothing of it works any more.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from harness.adapters.agents import find_function, find_script, is_script, program_metadata
from harness.adapters.sampling import session_sampling
from harness.adapters.trainer_sessions import ADMIN_TOKEN_VARIABLE, MODEL, TrainerSessions, rollout_directory
from harness.client.connections import SessionServerAddress
from harness.errors import AdapterError
from harness.rollouts.agents.task import AgentFunction, AgentTask, FunctionAgent, ProgramAgent
from harness.samples.delivery import Selection
from harness.samples.rollout import Rollout
from harness.types import Json, Message

DEADLINE_S = 1800.0


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Where episodes run, and which agent plays them."""

    server: SessionServerAddress
    agent: AgentFunction | str
    """A function, its dotted path, the name of a program that ships, or the path of a script or profile."""
    agent_env: tuple[tuple[str, str], ...] = ()
    deadline_s: float = DEADLINE_S
    matching: tuple[str, ...] | None = None
    """None: that of the agent's profile."""
    workdir: Path | None = None
    """Where the directories of rollouts stay; None: they go with their rollouts."""
    trust_agent_result: bool = False
    """A program's result may state the reward, although the model can write it. A function's always may."""

    @classmethod
    def read(
        cls,
        session_server: str,
        agent: AgentFunction | str,
        *,
        agent_env: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
        matching: Sequence[str] | None = None,
        workdir: str | None = None,
        trust_agent_result: bool = False,
    ) -> Self:
        """These settings with the admin token of the environment; raises `AdapterError` for an agent not there."""
        address = SessionServerAddress(session_server, os.environ.get(ADMIN_TOKEN_VARIABLE))
        env = tuple(sorted((agent_env or {}).items()))
        keep = None if workdir is None else Path(workdir)
        names = None if matching is None else tuple(matching)
        settings = cls(address, agent, env, deadline_s, names, keep, trust_agent_result)
        if isinstance(settings.find_agent(), Path) or not env:
            return settings
        raise AdapterError("agent_env: a function has no environment of its own; it is for programs")

    def require_trusted(self, instead: str) -> None:
        """Raise `AdapterError` where the agent is a program whose result may not state the reward."""
        if isinstance(self.find_agent(), Path) and not self.trust_agent_result:
            raise AdapterError(
                "agent: the model can write a program's result, so it states no reward;"
                f" {instead}, or set trust_agent_result=True"
            )

    def find_agent(self) -> Path | AgentFunction:
        """The script or the function. Raises `AdapterError` for one that is not there."""
        if not isinstance(self.agent, str):
            return self.agent
        if "." not in self.agent or is_script(self.agent):
            return find_script(self.agent, "agent")
        return find_function(self.agent, "agent", _import)


class Episodes:
    """Rollouts of one loop with the same settings."""

    def __init__(self, settings: EpisodeSettings) -> None:
        self._settings = settings
        self._sessions: TrainerSessions[AgentFunction] = TrainerSessions(
            settings.server, settings.find_agent, dict(settings.agent_env)
        )

    async def run(
        self,
        prompt: str | Sequence[Message],
        metadata: Mapping[str, Any],
        sampling_params: Mapping[str, Any],
        most_tokens: int | None,
        selection: Selection | None = Selection.ONE,
    ) -> Rollout:
        """Run one rollout to its end.

        Args:
            prompt: What the conversation begins with.
            metadata: The row of the data set. Functions get it whole, programs the items of the object `agent` in it.
            sampling_params: As for SGLang.
            most_tokens: Of the session's sequence, prompt included.
            selection: Of samples; None: that of the agent's profile, for a trainer that takes several.

        Raises `AdapterError` for what cannot be kept, and what `TrainerSessions.open` raises.
        """
        sampling = session_sampling(sampling_params)
        manager, agent = await self._sessions.open()
        is_program = isinstance(agent, ProgramAgent)
        known = program_metadata(metadata, "data") if is_program else {}
        session: Json = {"sampling": sampling}
        if selection is not None:
            session["selection"] = str(selection)
        if self._settings.matching is not None:
            session["matching"] = list(self._settings.matching)
        if most_tokens is not None:
            session["limits"] = {"tokens_per_session": most_tokens}
        async with rollout_directory(self._settings.workdir, uuid4().hex) as workdir:
            return await manager.run(
                AgentTask(
                    agent=agent if isinstance(agent, ProgramAgent) else _with_metadata(agent, metadata),
                    prompt=prompt,
                    workdir=workdir,
                    model=MODEL,
                    deadline_s=self._settings.deadline_s,
                    session=session,
                    metadata=known,
                )
            )

    async def close(self) -> None:
        """End what was opened. Idempotent."""
        await self._sessions.close()


_open: dict[tuple[asyncio.AbstractEventLoop, EpisodeSettings], Episodes] = {}


def episodes_of(
    settings: EpisodeSettings, register_end: Callable[[Callable[[], Awaitable[None]]], None] | None = None
) -> Episodes:
    """Those of the running loop with these settings.

    Args:
        settings: Equal ones share what they open.
        register_end: Gets the end of what is opened here, for a trainer that calls such functions when its loop ends.
    """
    for place in [place for place in _open if place[0].is_closed()]:
        del _open[place]
    place = (asyncio.get_running_loop(), settings)
    if place not in _open:
        _open[place] = Episodes(settings)
        if register_end is not None:
            register_end(_open[place].close)
    return _open[place]


async def close_episodes() -> None:
    """End everything that was opened in the running loop, for programs that go on after their trainer. Idempotent."""
    loop = asyncio.get_running_loop()
    for place in [place for place in _open if place[0] is loop]:
        await _open.pop(place).close()


def _with_metadata(function: AgentFunction, metadata: Mapping[str, Any]) -> FunctionAgent:
    """`function` with a row that may hold anything, which a session's own metadata may not."""

    async def run(**given: Any) -> dict[str, Any] | None:
        return await function(**{**given, "metadata": dict(metadata)})

    return FunctionAgent("agent", run)


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
