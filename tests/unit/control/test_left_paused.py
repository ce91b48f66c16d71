"""Engines that an abort finds paused: continued only where every gate says that they are nobody's."""

import asyncio
from functools import partial

import pytest

from harness.engines.base import PauseMode
from harness.errors import EnginesHeld, SessionServerError
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.abort_report import AbortReport
from harness.rollouts.control.engines import EngineInProcess
from tests.controllers.aborting import IMPATIENT
from tests.controllers.noting_engine import NotingEngine
from tests.session_servers.served import eventually, serving_with

NOWHERE = "http://127.0.0.1:9"

abort = partial(abort_rollout, [], budget=IMPATIENT)


@pytest.mark.parametrize("continues", [False, True])
async def test_an_engine_stays_paused_while_a_gate_cannot_say_whose_pause_it_is(engine, client, *, continues: bool):
    """A controller that updates it may have its hold there; the report says what can be done."""
    await engine.pause(PauseMode.ABORT)
    report = await abort(
        session_servers=[client.url, NOWHERE], engine_workers=[EngineInProcess(engine)], continue_engines=continues
    )

    assert not engine._running.is_set()
    assert (await client.gate())["holds"] == []
    [problem] = [each for each in report.problems if each.startswith("engine in process: ")]
    assert f"is paused, and {NOWHERE} cannot say whose pause it is" in problem
    assert "stays paused" in problem
    assert "continue_engines=True" in problem


class Contended(EngineInProcess):
    """Somebody else wants the engines while they are continued."""

    url = ""
    refusals: tuple[str, ...] = ()

    async def resume(self, *, deadline_s: float) -> None:
        async with SessionServerClient(Contended.url) as server:
            try:
                await server.gate("other").pause(deadline_s=5, engines=True)
            except SessionServerError as error:
                Contended.refusals += (error.code,)
        await super().resume(deadline_s=deadline_s)


async def test_no_other_controller_pauses_an_engine_between_the_look_and_the_continuing():
    """It has to wait until the engines continue, and gets them then; they are continued once."""
    engine = NotingEngine()
    async with serving_with(engine) as client, SessionServerClient(client.url) as server:
        await engine.pause(PauseMode.ABORT)
        Contended.url, Contended.refusals = client.url, ()
        report = await abort(session_servers=[client.url], engine_workers=[Contended(engine)], continue_engines=True)
        other = server.gate("other")
        await other.pause(deadline_s=5, engines=True)
        await other.resume(deadline_s=5, engines_continued=True)

        assert (client.server.left_engines.problem, engine._running.is_set()) == (None, True)
    assert (report.problems, [each.error for each in report.left_paused]) == ((), [None])
    assert Contended.refusals == (EnginesHeld.code,)
    assert engine.events.count("resume") == 1


async def test_an_engine_that_one_of_several_gates_knows_to_be_held_is_left_alone():
    """What the other gates had given for the continuing is given back, and no server continues it either."""
    engine = NotingEngine()
    async with (
        serving_with(engine) as first,
        serving_with(NotingEngine()) as second,
        SessionServerClient(second.url) as server,
    ):
        await server.gate("other").pause(deadline_s=5, engines=True)
        await engine.pause(PauseMode.ABORT)
        report = await abort(
            session_servers=[first.url, second.url], engine_workers=[EngineInProcess(engine)], continue_engines=True
        )

        assert (first.server.left_engines.problem, (await first.gate())["holds"]) == (None, [])
        assert [hold["holder"] for hold in (await second.gate())["holds"]] == ["other"]
    assert (report.problems, report.left_paused, engine.events.count("resume")) == ((), (), 0)


async def test_an_abort_that_is_cancelled_while_it_continues_an_engine_keeps_no_gate(engine, client):
    """The engines are given back as the gate is."""
    await engine.pause(PauseMode.ABORT)
    engine.fails["resume"] = None
    aborting: asyncio.Task[AbortReport] = asyncio.create_task(
        abort(session_servers=[client.url], engine_workers=[EngineInProcess(engine)], continue_engines=True)
    )
    await eventually(lambda: "resume" in engine.events)
    aborting.cancel()
    await asyncio.wait({aborting})

    assert aborting.cancelled()
    assert client.server.gatekeeper.gate.holds == ()
