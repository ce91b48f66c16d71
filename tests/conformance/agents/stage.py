"""A session server with agents that play against it, and what each of them did.

Agents come from their own environments, as programs that the manager starts, and everything is measured from outside:
by the engine's log, by a witness between agents and server, and by the samples that a trainer would get.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import httpx
import msgspec

from harness.rollouts.agents.task import AgentTask, ProgramAgent
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import Rollout
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.store.memory import MemoryStore
from tests.builders import toy_template
from tests.conformance.agents.parts import GO, IN_TOOL, INSTRUCTION, part_of
from tests.conformance.agents.staged_engine import Heard, StagedEngine
from tests.conformance.clients.witness import Witness

PATIENCE_S = 120
"""Eleven programs start at once on two cores."""


class Played(msgspec.Struct, frozen=True):
    """What one agent did in a scene."""

    outcome: str
    detail: str
    log: str
    """The end of what it printed."""
    seconds: float
    """From what happened to the end of its process; in the scene without an incident, from the beginning."""
    model_calls: int
    """How often it asked, all in all, answers that said no included."""
    streamed: int
    """How many answers came as a stream."""
    refusals: dict[str, int]
    main_turns: int
    """Turns of the conversation that the engine has sampled to an end."""
    side_calls: int
    """What it was asked beside."""
    is_exact: bool
    """Prompt and output of each turn of the conversation begin the next one's prompt, by the engine's log (I1)."""
    is_one_sample: bool
    """One sample has the tokens of the engine's log for the last turn of the conversation, all outputs trained."""
    samples: list[list[int]]
    """The turns of each sample."""
    generated: int
    unaccounted: int
    """The ledger's difference."""
    notes: str
    """What the agent wrote by its tool."""


Incident = Callable[["Stage"], Awaitable[None]]


@dataclass
class Stage:
    """A server, and the agents that play against it."""

    engine: StagedEngine
    http: httpx.AsyncClient
    witness: Witness
    manager: SessionManager
    agents: Sequence[ProgramAgent]
    workdir: Path
    sessions: dict[str, str] = field(default_factory=dict)
    """By the names of the agents."""
    happened_at: float = 0.0

    async def play(self, incident: "Incident") -> dict[str, Played]:
        """Run every agent to its end, while `incident` happens."""
        running = {agent.name: asyncio.create_task(self._run(agent)) for agent in self.agents}
        self.happened_at = time.monotonic()
        await incident(self)
        return {name: await task for name, task in running.items()}

    async def reach_tool(self) -> None:
        """Return once every agent waits in its tool."""
        await self._until(lambda: all((self._folder(agent) / IN_TOOL).exists() for agent in self.agents))

    def leave_tool(self) -> None:
        """Let every tool answer."""
        for agent in self.agents:
            (self._folder(agent) / GO).touch()

    async def turn_gate(self, verb: str) -> None:
        """`POST /sessions/<verb>`."""
        (await self.http.post(f"/sessions/{verb}")).raise_for_status()
        self.happened_at = time.monotonic()

    async def second_turns_hang(self) -> None:
        """Return once the second turn of every agent is in flight, and has come to its last token for now."""
        await self._until(lambda: sum(live.sampled == 3 for live in self.engine.live) == len(self.agents))

    async def become(self, name: str, count: int) -> None:
        """Return once the gate's report says that `name` is at least `count`."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.http.get("/sessions/gate")).json()[name] < count:
                await asyncio.sleep(0.05)

    async def all_refused(self, code: str) -> None:
        """Return once every agent has had a turn refused with `code`."""
        async with asyncio.timeout(PATIENCE_S):
            for session_id in self.sessions.values():
                while code not in (await self.http.get(f"/sessions/{session_id}")).json()["refusals"]:
                    await asyncio.sleep(0.05)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(0.05)

    def _folder(self, agent: ProgramAgent) -> Path:
        return self.workdir / agent.name

    async def _run(self, agent: ProgramAgent) -> Played:
        session_id = self.sessions[agent.name] = uuid4().hex
        self.engine.cast[session_id] = agent.name
        folder = self._folder(agent)
        session = {"session_id": session_id}
        task = AgentTask(agent, INSTRUCTION, folder, "scripted", deadline_s=PATIENCE_S, session=session)
        rollout = await self.manager.run(task)
        return self._played(rollout, session_id, folder, time.monotonic() - self.happened_at)

    def _played(self, rollout: Rollout, session_id: str, folder: Path, seconds: float) -> Played:
        heard = [each for each in self.engine.heard if each.session_id == session_id]
        main = [each for each in heard if each.step is not None]
        ledger = rollout.session["ledger"]
        gone = ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
        notes = folder / "notes.txt"
        return Played(
            outcome=rollout.outcome.kind,
            detail=rollout.outcome.detail,
            log=(folder / "agent.log").read_text(errors="replace")[-2000:],
            seconds=seconds,
            model_calls=self.witness.model_calls[session_id],
            streamed=self.witness.streamed[session_id],
            refusals=rollout.session["refusals"],
            main_turns=len({each.step for each in main}),
            side_calls=len(heard) - len(main),
            is_exact=is_exact(main),
            is_one_sample=is_one_sample(main, rollout),
            samples=[sample.metadata["turns"] for sample in rollout.samples],
            generated=ledger["generated"],
            unaccounted=ledger["generated"] - gone,
            notes=notes.read_text() if notes.exists() else "",
        )


def is_exact(main: Sequence[Heard]) -> bool:
    """Whether prompt and output of each request begin the prompt of the next one."""
    pairs = [(before.prompt + before.output, after.prompt) for before, after in pairwise(main)]
    return all(after[: len(before)] == before for before, after in pairs)


def is_one_sample(main: Sequence[Heard], rollout: Rollout) -> bool:
    """Whether the one sample of `rollout` is what the engine heard and said in the conversation, and nothing else."""
    if len(rollout.samples) != 1 or not main:
        return False
    [sample] = rollout.samples
    said = sum(len(each.output) for each in main)
    return tuple(sample.tokens.tolist()) == main[-1].prompt + main[-1].output and int(sample.loss_mask.sum()) == said


@asynccontextmanager
async def staged(
    agents: Sequence[ProgramAgent], workdir: Path, *, interrupted: bool = False, settings: ServerSettings | None = None
) -> AsyncIterator[Stage]:
    """A server whose model plays each agent its part."""
    engine = StagedEngine({agent.name: part_of(agent.name, interrupted=interrupted) for agent in agents})
    settings = settings or ServerSettings(comment_every_s=0.5)
    for agent in agents:
        (workdir / agent.name).mkdir(parents=True)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serve(engine, toy_template(), MemoryStore(), settings))
        witness = await stack.enter_async_context(Witness.of(running.url))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S))
        manager = await stack.enter_async_context(SessionManager(witness.url))
        yield Stage(engine, http, witness, manager, agents, workdir)
