"""Rollouts to be aborted: a session server with a scripted engine, a manager, and agents of every kind."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.rollouts.agents.task import AgentTask, FunctionAgent, ProgramAgent
from harness.rollouts.client.session_server import Deadlines
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.abort_report import AbortBudget, AbortReport
from harness.rollouts.control.engines import EngineInProcess, EngineWorker
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import Rollout
from harness.server.serving import RunningServer, serve
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from harness.types import Json
from tests.builders import toy_template

PATIENCE_S = 60
PATIENT = AbortBudget(
    drain_s=5, engines_s=5, hooks_s=5, agents_s=10, kill_s=4, collect_s=20, cancel_s=2, resume_s=5, total_s=60
)
"""No step needs it on a busy machine; whoever tests that a step costs its time shortens that step alone."""
IMPATIENT = replace(PATIENT, agents_s=0.3)
"""For agents that do not end by themselves."""
FAST = Deadlines(create_s=20, read_s=10, end_s=1, delete_s=5)

CALLING = """
import json, os, signal, sys, time, urllib.error, urllib.request

def call(messages):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

messages = [{"role": "user", "content": "go"}]

def turn():
    messages.extend([call(messages), {"role": "user", "content": "more"}])
"""
IGNORING = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        turn()
    except urllib.error.HTTPError:
        time.sleep(0.01)
"""
"""Takes no answer for an answer, and no SIGTERM either."""


@dataclass(slots=True)
class Stage:
    """What an abort is tried on."""

    manager: SessionManager
    server: RunningServer
    engine: ScriptedEngine
    directory: Path
    pending: list[asyncio.Task[Rollout]] = field(default_factory=list)

    def start(self, agent: Any, **changes: Any) -> asyncio.Task[Rollout]:
        """A pending rollout of `agent`: an async function, or the source of a program."""
        workdir = self.directory / str(len(self.pending))
        task = AgentTask(as_agent(agent), "Say something.", workdir, "scripted", **{"deadline_s": 60, **changes})
        self.pending.append(asyncio.create_task(self.manager.run(task), name=f"rollout {len(self.pending)}"))
        return self.pending[-1]

    async def abort(self, budget: AbortBudget = PATIENT, **options: Any) -> AbortReport:
        """Abort everything that is pending, with the hooks of the manager."""
        workers: list[EngineWorker | str] = options.pop("workers", [EngineInProcess(self.engine)])
        servers = options.pop("servers", [self.server.url])
        hooks = options.pop("hooks", [self.manager.abort_hooks()])
        told: Any = {"session_servers": servers, "engine_workers": workers, "agent_hooks": hooks, "budget": budget}
        return await abort_rollout(options.pop("pending", self.pending), **told, **options)

    async def generating(self, count: int = 1) -> None:
        """Return once that many generations are under way."""
        await eventually(lambda: len(self.engine.live) == count)

    async def running(self, count: int = 1) -> None:
        """Return once that many agents run."""
        await eventually(lambda: len(self.manager._require_runner()._running) == count)

    def gate(self) -> str:
        """Where the gate stands."""
        return str(self.server.server.gatekeeper.gate.state)

    def sessions(self) -> int:
        """How many sessions the server holds."""
        return len(self.server.server.sessions)


def as_agent(agent: Any) -> FunctionAgent | ProgramAgent:
    """An agent from an async function, the source of a program, or an agent."""
    if isinstance(agent, str):
        return ProgramAgent("program", (sys.executable, "-S", "-c", CALLING + agent))
    return agent if isinstance(agent, FunctionAgent | ProgramAgent) else FunctionAgent("function", agent)


@asynccontextmanager
async def stage(
    directory: Path, *steps: ScriptStep, settings: ServerSettings | None = None, grace_s: float = 0.3
) -> AsyncIterator[Stage]:
    """A stage; its pending rollouts are cancelled at the end."""
    chat_tokenizer = toy_template()
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script(steps) if steps else None)
    async with (
        serve(engine, chat_tokenizer, MemoryStore(), settings) as server,
        SessionManager(server.url, engines=[engine], grace_s=grace_s, deadlines=FAST) as manager,
    ):
        staged = Stage(manager, server, engine, directory / "rollouts")
        try:
            yield staged
        finally:
            for task in staged.pending:
                task.cancel()
            await asyncio.gather(*staged.pending, return_exceptions=True)


async def eventually(holds: Callable[[], bool]) -> None:
    """Return once `holds()` is true; fail when that takes too long."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)


async def call(base_url: str, messages: list[Json]) -> httpx.Response:
    """One model call."""
    body = {"model": "scripted", "messages": messages}
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(f"{base_url}/chat/completions", json=body, timeout=60)


async def cooperate(base_url: str, **_: Any) -> Json:
    """An agent that continues until its first refusal, and returns the code of it."""
    messages: list[Json] = [{"role": "user", "content": "go"}]
    while (answer := await call(base_url, messages)).status_code == 200:
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
    return {"status": answer.status_code, "code": answer.json()["error"]["code"]}


async def do_nothing(**_: Any) -> Json:
    """An agent that is done before it begins."""
    return {}


async def ignore(base_url: str, **_: Any) -> Json:
    """An agent that asks again whatever it is answered."""
    while True:
        await call(base_url, [{"role": "user", "content": "go"}])
        await asyncio.sleep(0.01)


async def think(**_: Any) -> Json:
    """An agent that is in a tool call for ever."""
    await asyncio.sleep(3600)
    return {}


async def refuse_to_end(**_: Any) -> Json:
    """An agent that ignores its cancellation as well, for as long as a test takes."""
    return await stubborn(30)


async def stubborn(seconds: float) -> Any:
    """Sleep through the first three cancellations."""
    ignored = 0
    while ignored < 3:
        try:
            await asyncio.sleep(seconds)
            break
        except asyncio.CancelledError:
            ignored += 1
    return {}


def returning(value: Any) -> Awaitable[Any]:
    """A pending task that returns `value`."""

    async def work() -> Any:
        await asyncio.sleep(0)
        return value

    return work()
