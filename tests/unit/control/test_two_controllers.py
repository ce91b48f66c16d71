"""Controllers at once, and controllers that die: whose hold opens what, and when the engines continue."""

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from dataclasses import replace

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from harness.engines.base import PauseMode
from harness.errors import EngineUnavailable, SessionServerError
from harness.rollouts.client.gate import renew_holds
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.abort_report import AbortBudget
from harness.rollouts.control.engines import EngineInProcess
from harness.rollouts.control.pause import paused_rollout
from harness.rollouts.control.weights import WeightUpdater
from harness.rollouts.control.weights_report import UpdateBudget
from harness.server.app import SessionServer
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from tests.builders import toy_template
from tests.controllers.noting_engine import CHECKPOINT, NotingEngine
from tests.session_servers.served import SetClock, eventually, serving_with

BRIEF = AbortBudget(drain_s=20, engines_s=20, hooks_s=0.1, agents_s=0.05, kill_s=0.05, collect_s=0.5)
QUICK = UpdateBudget(sweep_s=0, gate_s=5, pause_s=5, apply_s=5, verify_s=5, continue_s=0.5, turn_s=10)


async def test_an_abort_that_ends_does_not_open_the_gate_of_an_update(engine, client):
    """A call that waits for the new weights would meet a paused engine under the old ones."""
    async with WeightUpdater([engine], [client.url]).update(1) as update:
        report = await abort_rollout(
            [], session_servers=[client.url], engine_workers=[EngineInProcess(engine)], budget=BRIEF
        )
        gate = await client.gate()
        await update.apply(CHECKPOINT)

    assert report.problems == update.report.problems == ()
    assert (gate["state"], len(gate["holds"])) == ("paused", 1)
    assert (await client.gate())["state"] == "open"


async def test_an_update_inside_a_pause_does_not_open_its_gate(engine, client):
    async with paused_rollout([client.url], [EngineInProcess(engine)]):
        async with WeightUpdater([engine], [client.url]).update(1) as update:
            await update.apply(CHECKPOINT)
        gate = await client.gate()

    assert gate["state"] == "paused"
    assert (await client.gate())["state"] == "open"


async def test_the_second_update_waits_until_the_first_has_ended(engine, client):

    async def update(version: int) -> None:
        async with WeightUpdater([engine], [client.url], budget=QUICK).update(version) as update:
            await asyncio.sleep(0.1)
            await update.apply(CHECKPOINT)

    first = asyncio.create_task(update(1))
    await eventually(lambda: "pause abort" in engine.events)
    await update(2)
    await first

    assert engine.events == ["pause abort", "update 1", "resume", "pause abort", "update 2", "resume"]
    assert engine._running.is_set()


async def test_an_update_that_waits_too_long_says_for_whom_and_touches_nothing(engine, client):
    """The engine is not continued under the one that has it."""
    impatient = UpdateBudget(sweep_s=0, turn_s=0.1)
    async with WeightUpdater([engine], [client.url]).update(1):
        with pytest.raises(EngineUnavailable, match=r"waited 0.1 s for another update .* 'update-"):
            async with WeightUpdater([engine], [client.url], budget=impatient).update(2):
                pytest.fail("the block ran")
        assert engine.events == ["pause abort"]
        assert (await client.gate())["state"] == "paused"

    assert engine.events == ["pause abort", "resume"]


async def test_a_hold_is_renewed_as_long_as_its_block():
    """Each renewal gives it its whole time again, by the server's clock, which stands still in between."""
    engine, now = NotingEngine(), [1_000_000.0]
    async with serving_with(engine) as client:
        gatekeeper = client.server.gatekeeper
        gatekeeper.lease_clock = lambda: now[0]
        async with WeightUpdater([engine], [client.url], budget=replace(QUICK, hold_ttl_s=3.0)).update(1) as update:
            for _ in range(2):
                now[0] += 2.0
                await eventually(lambda: gatekeeper.gate.holds[0].until > now[0] + 2.5)
            await update.apply(CHECKPOINT)

        assert update.report.problems == ()


async def test_an_update_whose_hold_ran_out_applies_nothing(engine, client):
    """Its engines have gone on, and may be somebody else's by now."""
    async with WeightUpdater([engine], [client.url]).update(1) as update:
        client.server.gatekeeper.lease_clock = lambda: 1e12
        await eventually(lambda: not client.server.gatekeeper.gate.holds)
        with pytest.raises(EngineUnavailable, match="ran out at http://"):
            await update.apply(CHECKPOINT)

    assert not [event for event in engine.events if event.startswith("update")]
    assert engine._running.is_set()
    assert any("hold" in problem for problem in update.report.problems)


async def test_an_update_whose_server_was_away_for_longer_than_its_hold_continues_no_engine():
    """The server would have continued it, and may have given it to another controller; it does not say so."""
    engine, budget = NotingEngine(), replace(QUICK, hold_ttl_s=2.0)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(serving_with(engine))
        async with WeightUpdater([engine], [client.url], budget=budget).update(1) as update:
            await stack.aclose()
            await asyncio.sleep(2.1)
            with pytest.raises(EngineUnavailable, match="ran out at http://"):
                await update.apply(CHECKPOINT)

    assert engine.events == ["pause abort"]


async def test_nothing_is_left_of_a_hold_that_was_never_placed():
    """A controller whose first verb did not arrive ends all the same."""
    async with serving_with(NotingEngine()) as client, SessionServerClient(client.url) as server:
        gate = server.gate("nobody")
        async with renew_holds([gate]):
            report = await gate.resume(deadline_s=5)

    assert report.state == "open"


class LostAnswers:
    """A gateway that breaks while it drains: the server may have done it (`arrives`), the client never knows."""

    def __init__(self, app: ASGIApp, *, arrives: bool) -> None:
        self._app = app
        self._arrives = arrives
        self.asked: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        self.asked.append(scope.get("path", ""))
        if self.asked[-1] != "/sessions/drain":
            await self._app(scope, receive, send)
            return
        if self._arrives:
            await self._app(scope, receive, _lose)
        await send({"type": "http.response.start", "status": 502, "headers": []})
        await send({"type": "http.response.body"})


async def _lose(message: Message) -> None:
    del message


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_hold_whose_answer_was_lost_is_renewed_if_it_is_there(*, arrives: bool):
    """Else it runs out under the work that is done behind it; one that never was there is not lost either."""
    gateways: list[LostAnswers] = []
    clock = SetClock()

    def around(server: SessionServer) -> AbstractAsyncContextManager[ASGIApp]:
        gateways.append(LostAnswers(server.app(), arrives=arrives))
        return nullcontext(gateways[0])

    serving = serve(NotingEngine(), toy_template(), MemoryStore(), around=around, clock=clock)
    async with serving as running, SessionServerClient(running.url) as server:
        gate, holds = server.gate("abort", ttl_s=0.3), running.server.gatekeeper.gate
        with pytest.raises(SessionServerError):
            await gate.drain(deadline_s=30)
        async with renew_holds([gate]):
            clock.now += 0.2
            await eventually(lambda: "/sessions/renew" in gateways[0].asked)
            if arrives:
                await eventually(lambda: holds.holds[0].until > clock.now + 0.25)
        await gate.resume(deadline_s=30)

        assert (str(holds.state), gate.is_lost) == ("open", False)


class Elsewhere(NotingEngine):
    """Lives on when its session server ends."""

    async def __aexit__(self, kind, error, trace):
        """See `TokenProvider`."""


@pytest.mark.parametrize("moment", ["before the weights", "after the weights"])
async def test_an_update_whose_server_was_started_anew_continues_its_engine(moment: str):
    """A server with its memory gone knows of no hold, so it would never continue what the hold left paused."""
    engine = Elsewhere()
    async with AsyncExitStack() as stack:
        url = (await stack.enter_async_context(serving_with(engine))).url
        with suppress(EngineUnavailable):
            async with WeightUpdater([engine], [url], budget=QUICK).update(1) as update:
                if moment == "after the weights":
                    await update.apply(CHECKPOINT)
                await stack.aclose()
                anew = ServerSettings(port=int(url.rpartition(":")[2]))
                await stack.enter_async_context(serve(engine, toy_template(), MemoryStore(), anew))
                if moment == "before the weights":
                    await update.apply(CHECKPOINT)

        async with SessionServerClient(url) as server:
            assert (await server.gate().report(deadline_s=5)).state == "open"
        assert engine._running.is_set()


async def test_an_update_that_gives_up_continues_no_engine_of_the_one_that_has_it():
    """The other one has not reached the first server; giving its gate back must not wake what was never touched."""
    engine = Elsewhere()
    impatient = UpdateBudget(sweep_s=0, turn_s=0.1)
    async with serving_with(engine) as first, serving_with(engine) as second, SessionServerClient(second.url) as other:
        await other.gate("other").pause(deadline_s=5, engines=True)
        await engine.pause(PauseMode.ABORT)
        with pytest.raises(EngineUnavailable, match="'other'"):
            async with WeightUpdater([engine], [first.url, second.url], budget=impatient).update(1):
                pytest.fail("the block ran")
        await eventually(lambda: first.server.left_engines.problem is None)

        assert (await first.gate())["state"] == "open"
        assert not engine._running.is_set()
