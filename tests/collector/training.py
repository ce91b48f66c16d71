"""Steps to be trained: a session server, a manager, and agents that play a few turns of a conversation."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness.engines.base import TokenProvider
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.rollouts.agents.task import AgentTask, FunctionAgent
from harness.rollouts.client.session_server import Deadlines
from harness.rollouts.control.abort_report import AbortBudget
from harness.rollouts.manager import SessionManager
from harness.rollouts.seeds import derive_seed
from harness.samples.rollout import Rollout
from harness.server.serving import RunningServer, serve
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore, SessionStore
from harness.training.collector.groups import RolloutIndex
from harness.training.collector.rollout_source import SessionSource
from harness.types import Json
from tests.builders import toy_template

BUDGET = AbortBudget(drain_s=5, engines_s=5, hooks_s=5, agents_s=10, kill_s=4, collect_s=20, cancel_s=2, total_s=60)
DEADLINES = Deadlines(create_s=20, read_s=10, end_s=1, delete_s=5)
SAID = tuple(ScriptStep(text=text) for text in ("Yes.", "It depends on what you mean.", "No, not at all, never.", "Ok"))


@dataclass(slots=True)
class Field:
    """Where rollouts are played: a server, an engine, and the failures that happen by index."""

    server: RunningServer
    manager: SessionManager
    engine: TokenProvider
    http: httpx.AsyncClient
    directory: Path
    turns: Callable[[RolloutIndex], int] = lambda _: 2
    """How many model calls a rollout makes."""
    session: Json = field(default_factory=dict)
    """Body of every session."""
    fails: Any = None
    """A rollout for whose index this is true raises."""
    began: list[RolloutIndex] = field(default_factory=list)
    """Indices of the agents, in the order in which they began."""

    def source(self, name: str = "", manager: SessionManager | None = None, **how: Any) -> SessionSource:
        """Rollouts with `turns` model calls, and a reward that depends on the index alone."""

        def make_task(index: RolloutIndex) -> AgentTask:
            place = f"{index.group.step}-{index.group.number}-{index.member}-{index.attempt}"
            prompt = f"Question {index.group.step}.{index.group.number}" + "?" * (index.group.number % 5)
            return AgentTask(
                FunctionAgent("play", self._play, {"index": index}),
                prompt,
                self.directory / name / place,
                "m",
                deadline_s=60,
                session=self.session,
            )

        return SessionSource(manager or self.manager, make_task, reward_of, budget=BUDGET, **how)

    async def _play(self, base_url: str, prompt: str, api_key: str, index: RolloutIndex, **_: Any) -> Json:
        self.began.append(index)
        if self.fails is not None and self.fails(index):
            raise RuntimeError("this one fails")
        messages: list[Json] = [{"role": "user", "content": prompt}]
        for turn in range(self.turns(index)):
            answer = await self.http.post(f"{base_url}/chat/completions", json={"model": "m", "messages": messages})
            if answer.status_code != 200:
                raise RuntimeError(answer.text)
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"And {turn}?"}]
        return {}

    def sessions(self) -> int:
        """How many sessions the server holds."""
        return len(self.server.server.sessions)


async def reward_of(index: RolloutIndex, rollout: Rollout) -> float:
    """Depends on the index alone."""
    return derive_seed(7, index.group.step, index.group.number, index.member) % 5 / 4


@asynccontextmanager
async def playing(
    directory: Path,
    *steps: ScriptStep,
    engine: TokenProvider | None = None,
    settings: ServerSettings | None = None,
    store: SessionStore | None = None,
) -> AsyncIterator[Field]:
    """A field, with a scripted engine and a store in memory unless others are given."""
    template = toy_template()
    chosen = engine or ScriptedEngine(template.tokenizer, Script(steps or SAID))
    async with (
        serve(chosen, template, store or MemoryStore(), settings) as server,
        SessionManager(server.url, engines=[chosen], deadlines=DEADLINES, grace_s=0.5) as manager,
        httpx.AsyncClient(timeout=60, trust_env=False, limits=httpx.Limits(max_connections=100)) as http,
    ):
        yield Field(server, manager, chosen, http, directory)
