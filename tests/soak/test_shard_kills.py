"""A front and its shards, any of which are killed with SIGKILL during a pause, an update and a drain: I8 and I9.

Agents talk and ask again meanwhile. The engine is this process's, and counts the turns that reach it: while a hold is
known to be in force it must not hear of one, whoever has died. `HARNESS_SOAK_KILLS` says how many deaths.
"""

import asyncio
import os
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from harness.engines.scripted import ScriptStep
from harness.errors import HarnessError, SessionServerError
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.weights import WeightUpdater
from harness.rollouts.control.weights_report import UpdateBudget
from tests.builders import body, user
from tests.fake_engines.fake_server import serving
from tests.fake_engines.fake_sglang import FakeSGLang
from tests.fake_engines.providers import scripted_engine
from tests.session_servers.asked_bodies import is_digest_of
from tests.session_servers.store_file import ledger_of, read_file
from tests.shard_fleet import ShardFleet

KILLS = int(os.environ.get("HARNESS_SOAK_KILLS", "6"))
AGENTS = 6
VICTIMS = ["a shard", "the front", "a shard and the front", "both shards"]
WORKS = ["pause", "update", "drain"]
TTL_S = 4.0
LEAST_PROMPT = 60
"""Tokens of a turn; what a provider asks to test an engine is shorter."""
STEPS = [ScriptStep(text=f"answer {number} " + "x" * (number % 7), token_delay_s=0.002) for number in range(200)]


class CountingEngine(FakeSGLang):
    """Counts the turns that reach it."""

    turns = 0

    def app(self) -> web.Application:
        app = super().app()
        app.middlewares.insert(0, self._count)
        return app

    @web.middleware
    async def _count(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path == "/generate":
            self.turns += len((await request.json())["input_ids"]) >= LEAST_PROMPT
        return await handler(request)


class Agents:
    """What the agents know: answers that they got, and sessions that they were given before some moment."""

    def __init__(self, fleet: ShardFleet) -> None:
        self.fleet = fleet
        self.answers: Counter[tuple[str, bytes, tuple[float, ...]]] = Counter()
        self.sessions: set[str] = set()
        self.over = False

    async def work(self, dice: random.Random) -> None:
        """Create a session, talk, and begin anew when it is over."""
        async with self.fleet.client() as owner, httpx.AsyncClient(timeout=30) as http:
            while not self.over:
                with suppress(httpx.TransportError):
                    answer = await owner.post("/sessions", json={"sampling": {"seed": dice.randrange(1000)}})
                    assert answer.status_code in (200, 502, 503), answer.text
                    if answer.status_code == 200:
                        self.sessions.add(answer.json()["session_id"])
                        await self._talk(http, **answer.json())
                await asyncio.sleep(0.05)

    async def _talk(self, http: httpx.AsyncClient, session_id: str, base_url: str, api_key: str) -> None:
        messages = [user("begin a conversation that is long enough to be told from a test of the engine")]
        while not self.over:
            content = body(messages, logprobs=True)
            answer = await self._ask(http, f"{base_url}/v1/chat/completions", api_key, content)
            if answer is None:
                return
            choice = answer["choices"][0]
            logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
            self.answers[session_id, content, logprobs] += 1
            messages = [*messages, choice["message"], user("continue")]

    async def _ask(self, http: httpx.AsyncClient, url: str, api_key: str, content: bytes) -> dict | None:
        while not self.over:
            with suppress(httpx.TransportError):
                answer = await http.post(url, content=content, headers={"authorization": f"Bearer {api_key}"})
                assert answer.status_code in (200, 404, 502, 503), answer.text
                if answer.status_code == 200:
                    return answer.json()
                if answer.status_code == 404:
                    return None
            await asyncio.sleep(0.05)
        return None


class Deaths:
    """Kills, one after another, each at some moment of some work; and what must hold during and after it."""

    def __init__(self, fleet: ShardFleet, engine: CountingEngine, agents: Agents, dice: random.Random) -> None:
        self.fleet = fleet
        self.engine = engine
        self.agents = agents
        self.dice = dice
        self.version = 0

    async def kill(self, victim: str) -> None:
        """Kill, and have the front started again where it is dead."""
        if "shard" in victim:
            for number in (0, 1) if "both" in victim else [self.dice.randrange(2)]:
                self.fleet.kill_shard(number)
        if "front" in victim:
            await self.fleet.kill_front()
            await self.fleet.start()

    async def pause(self, victim: str) -> None:
        """Placed, killed before or after its answer, held while everything is started again, released."""
        async with SessionServerClient(self.fleet.address) as client:
            gate = client.gate(f"holder-{self.dice.random()}", 120.0)
            is_early = self.dice.random() < 0.3
            early = asyncio.create_task(self.kill(victim)) if is_early else None
            await until_done(lambda: gate.pause(deadline_s=6))
            if early is not None:
                await early
            while True:
                report = await until_done(lambda: gate.report(deadline_s=6))
                if not report.problems and not report.turns_generating:
                    break
                await asyncio.sleep(0.05)
            turns = self.engine.turns
            if early is None:
                await self.kill(victim)
            report = await self.fleet.serves()
            await asyncio.sleep(0.1)
            assert report["state"] == "paused", report
            assert self.engine.turns == turns, "a turn came through a shut gate"
            late = asyncio.create_task(self.kill(victim)) if self.dice.random() < 0.3 else None
            await until_done(lambda: gate.resume(deadline_s=6))
            if late is not None:
                await late

    async def update(self, victim: str) -> None:
        """Killed at some moment of an update; it may fail, and leaves nothing shut."""
        self.version += 1
        budget = UpdateBudget(sweep_s=1, hold_ttl_s=TTL_S, turn_s=10, connect_s=10)

        async def run() -> None:
            updater = WeightUpdater([f"sglang={self.engine.url}"], [self.fleet.address], budget=budget)
            with suppress(HarnessError):
                async with updater.update(self.version) as update:
                    await update.apply(Path("/weights/b"))

        work = asyncio.create_task(run())
        await asyncio.sleep(self.dice.uniform(0, 0.4))
        await self.kill(victim)
        await work

    async def drain(self, victim: str) -> None:
        """Killed at some moment of a drain; sessions that it was answered for never take another turn."""
        async with SessionServerClient(self.fleet.address) as client:
            gate = client.gate(f"holder-{self.dice.random()}", 120.0)
            killing = asyncio.create_task(self.kill(victim)) if self.dice.random() < 0.5 else None
            before = set(self.agents.sessions)
            await until_done(lambda: gate.drain(deadline_s=6))
            if killing is None:
                killing = asyncio.create_task(self.kill(victim))
            await until_done(lambda: gate.resume(deadline_s=6))
            await killing
        await self.fleet.serves()
        for session_id in before:
            async with self.fleet.client() as http:
                facts = (await http.get(f"/sessions/{session_id}/facts")).json()
            assert facts["phase"] != "open", (facts, "a drained session takes turns")


async def until_done(verb: Callable[[], Awaitable]) -> object:
    """The answer of a verb that is repeated as long as nobody answers, as any controller does."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await verb()
            except SessionServerError as error:
                if not (error.retryable or error.status >= 500):
                    raise
                await asyncio.sleep(0.1)


@pytest.mark.timeout(7200)
async def test_front_and_shards_that_are_killed_again_and_again_lose_nothing_and_let_nothing_through(tmp_path):
    """After every death the gate is open and turns continue; at the end the files are checked."""
    seed = int(os.environ.get("HARNESS_SOAK_SEED", "0"))
    dice = random.Random(seed)
    engine = CountingEngine(scripted_engine(*STEPS))
    async with engine.engine, serving(engine, notices_disconnects=False):
        options = ("--stop-grace=0", "--drain-grace=0.2", "--idle-hours=0")
        async with ShardFleet(tmp_path, *options, engine=f"sglang={engine.url}") as fleet:
            agents = Agents(fleet)
            deaths = Deaths(fleet, engine, agents, dice)
            async with asyncio.TaskGroup() as tasks:
                for number in range(AGENTS):
                    tasks.create_task(agents.work(random.Random(f"{seed},{number}")))
                try:
                    for number in range(KILLS):
                        work, victim = WORKS[number % len(WORKS)], dice.choice(VICTIMS)
                        print(number, work, victim, flush=True)
                        await getattr(deaths, work)(victim)
                        await opens(fleet, engine)
                finally:
                    agents.over = True
        check(fleet, agents)
    assert agents.answers
    print(f"{KILLS} deaths, {len(agents.sessions)} sessions, {agents.answers.total()} answers")


async def opens(fleet: ShardFleet, engine: CountingEngine) -> None:
    """The gate is open, at every shard, and turns reach the engine."""
    async with asyncio.timeout(60):
        while (await fleet.serves())["state"] != "open":
            await asyncio.sleep(0.1)
        turns = engine.turns
        while engine.turns == turns:
            await asyncio.sleep(0.02)


def check(fleet: ShardFleet, agents: Agents) -> None:
    """What the files must say when everybody is dead; `read_file` checks prompts and digests (I1)."""
    stored: dict[tuple[str, tuple[float, ...]], list[str]] = defaultdict(list)
    for path in fleet.stores():
        for session_id, session in read_file(path).items():
            for turn in filter(attrgetter("is_usable"), session.turns.values()):
                stored[session_id, tuple(turn.logprobs)].append(turn.request_digest)
            ledger = ledger_of(session)
            assert ledger["generated"] == ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
    for session_id, content, logprobs in agents.answers:
        digests = stored[session_id, logprobs]
        assert any(is_digest_of(content, digest) for digest in digests), "an answer was lost (I9)"
