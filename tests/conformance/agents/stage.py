"""A session server with an agent that plays against it, and what it did.

The agent comes from its own environment, as a program that the manager starts, and everything is measured from outside:
by the engine's log, by a witness between agents and server, and by the samples that a trainer would get.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import httpx
import msgspec

from harness.rollouts.agents.task import AgentTask, ProgramAgent
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import Rollout
from harness.server.registry import API_KEY_PREFIX
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from harness.tokens.chat_tokenizer import ChatTokenizer
from tests.builders import toy_template
from tests.conformance.agents.parts import ENVIRONMENT, GO, IN_TOOL, INSTRUCTION, SAMPLED_BEFORE_HANGING, TOOLLESS
from tests.conformance.agents.staged_engine import Heard, Part, StagedEngine
from tests.conformance.clients.witness import Witness

MODEL = "organization/model"
"""Hub ids have a slash, which some agents take for the end of a provider's name."""

PATIENCE_S = 100
"""Several programs start at once on few cores."""


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
    is_sample_a_turn: bool
    """Each turn of the conversation is a sample of what the engine's log has of it, all outputs trained."""
    samples: list[list[int]]
    """The turns of each sample."""
    generated: int
    unaccounted: int
    """The ledger's difference."""
    is_told: bool
    """The model got the instruction, word for word."""
    notes: str
    """What the agent wrote by its tool."""
    hides_session: bool
    """A program that the agent ran had neither the key nor the address of the session in its environment."""


Incident = Callable[["Stage"], Awaitable[None]]


@dataclass
class Stage:
    """A server, and the one agent that plays against it."""

    engine: StagedEngine
    http: httpx.AsyncClient
    witness: Witness
    manager: SessionManager
    agent: ProgramAgent
    folder: Path
    """The agent's working directory."""
    session_id: str
    happened_at: float = 0.0

    async def play(self, incident: Incident) -> Played:
        """Run the agent to its end, while `incident` happens."""
        self.happened_at = time.monotonic()
        running = asyncio.create_task(self._run())
        with suppress(TimeoutError):  # an agent that does not come so far, which its end will tell
            await incident(self)
        self.leave_tool()
        await self.turn_gate("resume")
        return self._played(await running)

    async def reach_tool(self) -> None:
        """Return once the agent waits in its tool."""
        await self._until((self.folder / IN_TOOL).exists)

    def leave_tool(self) -> None:
        """Let the tool answer."""
        (self.folder / GO).touch()

    async def turn_gate(self, verb: str) -> None:
        """`POST /sessions/<verb>`."""
        (await self.http.post(f"/sessions/{verb}")).raise_for_status()

    def happens_now(self) -> None:
        """Seconds count from here."""
        self.happened_at = time.monotonic()

    async def second_turn_hangs(self) -> None:
        """Return once the second turn is in flight, and has come to its last token for now."""
        await self._until(lambda: any(live.sampled == SAMPLED_BEFORE_HANGING for live in self.engine.live))

    async def is_held(self) -> None:
        """Return once a request waits at the gate."""
        async with asyncio.timeout(PATIENCE_S):
            while not (await self.http.get("/sessions/gate")).json()["held"]:
                await asyncio.sleep(0.05)

    async def is_refused(self, code: str) -> None:
        """Return once a turn was refused with `code`."""
        async with asyncio.timeout(PATIENCE_S):
            while code not in (await self.http.get(f"/sessions/{self.session_id}")).json()["refusals"]:
                await asyncio.sleep(0.05)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(0.05)

    async def _run(self) -> tuple[Rollout, float]:
        session = {"session_id": self.session_id}
        task = AgentTask(self.agent, INSTRUCTION, self.folder, MODEL, deadline_s=2 * PATIENCE_S, session=session)
        return await self.manager.run(task), time.monotonic()

    def _played(self, run: tuple[Rollout, float]) -> Played:
        rollout, ended_at = run
        heard = self.engine.heard
        main = [each for each in heard if each.step is not None]
        ledger = rollout.session["ledger"]
        gone = ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
        notes, environment = self.folder / "notes.txt", self.folder / ENVIRONMENT
        found = environment.read_text() if environment.exists() else self.session_id
        return Played(
            outcome=rollout.outcome.kind,
            detail=rollout.outcome.detail,
            log=(self.folder / "agent.log").read_text(errors="replace")[-2000:],
            seconds=ended_at - self.happened_at,
            model_calls=self.witness.model_calls[self.session_id],
            streamed=self.witness.streamed[self.session_id],
            refusals=rollout.session["refusals"],
            main_turns=len({each.step for each in main}),
            side_calls=len(heard) - len(main),
            is_exact=is_exact(main),
            is_one_sample=is_one_sample(main, rollout),
            is_sample_a_turn=is_sample_a_turn(main, rollout),
            samples=[sample.metadata["turns"] for sample in rollout.samples],
            generated=ledger["generated"],
            unaccounted=ledger["generated"] - gone,
            is_told=INSTRUCTION in json.dumps(rollout.session["turns"]),
            notes=notes.read_text() if notes.exists() else "",
            hides_session=self.session_id not in found and API_KEY_PREFIX not in found,
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


def is_sample_a_turn(main: Sequence[Heard], rollout: Rollout) -> bool:
    """Whether every request of the conversation is a sample of its own, of what the engine heard and said.

    Requests that continue one another are one.
    """
    turns = list({each.step: each for each in main}.values())
    samples = [tuple(sample.tokens.tolist()) for sample in rollout.samples]
    trained = sum(int(sample.loss_mask.sum()) for sample in rollout.samples)
    said = sum(len(each.output) for each in main)
    return samples == [each.prompt + each.output for each in turns] and trained == said


@asynccontextmanager
async def staged(
    agent: ProgramAgent,
    folder: Path,
    part: Part,
    *,
    settings: ServerSettings,
    chat_tokenizer: ChatTokenizer | None = None,
) -> AsyncIterator[Stage]:
    """A server whose model plays `part` to `agent`, by its own template when there is no other."""
    agent = replace(agent, env={**agent.env, **TOOLLESS.get(agent.name, {})})
    template = chat_tokenizer or toy_template()
    engine = StagedEngine(part, template.tokenizer)
    folder.mkdir(parents=True)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serve(engine, template, MemoryStore(), settings))
        witness = await stack.enter_async_context(Witness.of(running.url))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S))
        manager = await stack.enter_async_context(SessionManager(witness.url))
        yield Stage(engine, http, witness, manager, agent, folder, uuid4().hex)
