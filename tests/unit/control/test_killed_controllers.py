"""Two controllers at once, each of which may die at any step: the gate is shut exactly while somebody holds it.

Abort, pause and update in every pairing. Who survives gets its work done under a gate that stays shut for it, on
engines that stand still for it; who dies keeps gate and engines for the time of its hold, and no longer.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.abort_report import AbortBudget, AgentHooks
from harness.rollouts.control.engines import EngineInProcess
from harness.rollouts.control.pause import paused_rollout
from harness.rollouts.control.weights import WeightUpdater
from harness.rollouts.control.weights_report import UpdateBudget
from harness.server.app import SessionServer
from harness.server.serving import serve
from harness.server.store.base import MemoryStore
from tests.builders import toy_template, user
from tests.controllers.mortals import Death, Life, MortalEngine, Mortality
from tests.controllers.noting_engine import CHECKPOINT, NotingEngine
from tests.session_servers.served import PATIENCE_S, Client, SetClock, eventually
from tests.thoroughness import examples

TTL_S = 0.06
"""Of who may die, by the server's clock, which stands still; renewals come all the time."""
LONG_TTL_S = 80_000.0
MOST_STEPS = 12


class Scene:
    """A server, its engine, and controllers that work on both."""

    def __init__(self, client: Client[NotingEngine], lives: list[Life]) -> None:
        self.client = client
        self.lives = lives
        self.engine = client.engine

    def must_be_shut(self, *, engine: bool = False) -> None:
        """What a controller may count on while it works."""
        assert self.client.server.gatekeeper.gate.state != "open"
        assert not (engine and self.engine._running.is_set())

    async def stay(self, life: Life, *, engine: bool = False) -> None:
        """Be in the middle of one's work for a few rounds."""
        for _ in range(5):
            if not life.is_mortal:
                self.must_be_shut(engine=engine)
            await asyncio.sleep(0.003)

    async def abort(self, number: int) -> None:
        life = self.lives[number]
        budget = AbortBudget(30, 30, 30, 0.02, 0.02, 0.1, 0.1, 30, 120, hold_ttl_s=life.ttl_s)
        hooks = AgentHooks("at work", abort=lambda: self.stay(life))
        report = await abort_rollout(
            [],
            session_servers=[self._url(number)],
            engine_workers=[self._worker(number)],
            agent_hooks=[hooks],
            budget=budget,
        )
        assert life.is_mortal or report.problems == (), report.problems

    async def pause(self, number: int) -> None:
        life = self.lives[number]
        budget = AbortBudget(30, 30, resume_s=30, hold_ttl_s=life.ttl_s)
        async with paused_rollout([self._url(number)], [self._worker(number)], budget):
            await self.stay(life)

    async def update(self, number: int) -> None:
        life = self.lives[number]
        budget = UpdateBudget(30, 0, 4, 30, 30, 30, 30, 0.05, turn_s=PATIENCE_S, hold_ttl_s=life.ttl_s)
        updater = WeightUpdater([MortalEngine(self.engine, life)], [self._url(number)], budget=budget)
        async with updater.update(1) as update:
            await self.stay(life, engine=True)
            await update.apply(CHECKPOINT)
            await self.stay(life, engine=True)

    def _url(self, number: int) -> str:
        return f"{self.client.url}/c{number}"

    def _worker(self, number: int) -> EngineInProcess:
        return EngineInProcess(MortalEngine(self.engine, self.lives[number]))  # type: ignore[arg-type]  # the rest is passed on


async def play(kinds: tuple[str, str], lives: list[Life]) -> None:
    """Both controllers at once, to their ends; then time passes."""
    clock, engine = SetClock(), NotingEngine()
    for life in lives:
        life.ttl_s = TTL_S if life.is_mortal else LONG_TTL_S
    serving = serve(
        engine,
        toy_template(),
        MemoryStore(),
        around=lambda server: nullcontext(Mortality(server.app(), lives, clock)),
        clock=clock,
    )
    async with (
        asyncio.timeout(3 * PATIENCE_S),
        serving as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as http,
    ):
        client = Client(http, engine, running.server, running.url, running.restored)
        scene = Scene(client, lives)
        work: list[Callable[[int], Awaitable[None]]] = [getattr(scene, kind) for kind in kinds]
        tasks = [asyncio.ensure_future(each(number)) for number, each in enumerate(work)]
        for life, task in zip(lives, tasks, strict=True):
            life.end = task.cancel
        while (await asyncio.wait(tasks, timeout=0.1))[1]:  # somebody waits for the engines of one who has died
            passes(running.server, clock)
        held = any(life.holds_until > clock.now for life in lives)
        assert (running.server.gatekeeper.gate.state != "open") == held
        passes(running.server, clock)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: not running.server.gatekeeper.gate.holds)
        await eventually(engine._running.is_set)

        for end, life in zip(ends, lives, strict=True):
            assert not isinstance(end, AssertionError), end
            if not life.is_mortal:
                assert end is None, (end, life.steps)
            elif end is not None and not isinstance(end, asyncio.CancelledError | HarnessError):
                raise end
        assert (await client.gate())["state"] == "open"
        assert running.server.left_engines.problem is None
        assert await client.say(await client.create(), [user("a")])


def passes(server: SessionServer, clock: SetClock) -> None:
    """The time of a hold goes by."""
    clock.now += TTL_S
    server.gatekeeper.look_again()


LIVES = st.builds(
    Life,
    last_step=st.one_of(st.integers(0, MOST_STEPS), st.integers(0, MOST_STEPS), st.none()),
    death=st.sampled_from(Death),
)
KINDS = st.sampled_from(["abort", "update", "pause"])


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("quiet_logs")
def test_whoever_dies_at_whatever_step_the_gate_is_shut_exactly_while_somebody_holds_it():
    """Over pairs of controllers, the step at which each dies, and how."""

    @settings(
        max_examples=int(os.environ.get("HARNESS_SOAK_EXAMPLES", examples(20))),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.tuples(KINDS, KINDS), LIVES, LIVES)
    def any_two(kinds: tuple[str, str], first: Life, second: Life) -> None:
        asyncio.run(play(kinds, [first, second]))

    any_two()


@pytest.mark.usefixtures("quiet_logs")
@pytest.mark.parametrize("death", Death)
@pytest.mark.parametrize("step", range(7))
async def test_an_update_that_dies_beside_one_that_lives(step: int, death: Death):
    """At each of its steps: sweep and versions, gate, engine, weights, engine, gate."""
    lives = [Life(step, death), Life(None)]
    await play(("update", "update"), lives)
