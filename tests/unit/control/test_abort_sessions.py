"""An abort of some sessions: they end as in any abort, and nobody else on the server, or in the engine, notices."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.errors import ScenarioError
from harness.rollouts.agents.task import AgentTask
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.abort_report import AbortStep, Keep
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import OutcomeKind
from harness.server.settings import ServerSettings
from harness.types import SampleStatus
from tests.controllers.aborting import (
    FAST,
    IGNORING,
    IMPATIENT,
    PATIENT,
    Stage,
    as_agent,
    cooperate,
    eventually,
    ignore,
    stage,
    think,
)
from tests.session_servers.scripted import HANG_UP, canned_server
from tests.thoroughness import examples

HANGING = ScriptStep(text="abc", fault=ScriptedFault.HANG, fault_after=2)
SLOW = ScriptStep(text="A slow answer.", token_delay_s=0.02)
NO_GRACE = ServerSettings(drain_grace_s=3600)
"""A turn that ends in time has been ended in its engine; the grace of a drain has not run out."""


async def sessions_of(staged: Stage, *numbers: int) -> list[str]:
    """The sessions on which the rollouts with these numbers run, once they have them."""
    wanted = {str(number) for number in numbers}

    def found() -> list[str]:
        return [session for session, task in staged.manager.live.items() if task.workdir.name in wanted]

    await eventually(lambda: len(found()) == len(wanted))
    return found()


async def test_some_sessions_end_and_the_others_notice_nothing(tmp_path: Path):
    """Turns that are cut short are ABORTED and answered 404; those of others are still being generated."""
    async with stage(tmp_path, HANGING, settings=NO_GRACE) as staged:
        for _ in range(4):
            staged.start(cooperate)
        await staged.generating(4)
        before = {each.request_id for each in staged.engine.live}
        report = await staged.manager.abort(
            staged.pending[:2], sessions=await sessions_of(staged, 0, 1), budget=PATIENT, rollout_id=7
        )
        left = {each.request_id for each in staged.engine.live if not each.is_aborted}
        seen = (staged.gate(), staged.sessions(), [task.done() for task in staged.pending])
        later = await staged.start(cooperate, session={"limits": {"turns": 1}}, deadline_s=0.2)

    assert report.problems == ()
    assert tuple(report.seconds) == tuple(AbortStep)
    assert (report.turns_left, report.engines, report.resumed) == (0, (), ())
    assert [rollout.outcome.kind for rollout in report.rollouts] == [OutcomeKind.DRAINED] * 2
    assert [rollout.agent_result for rollout in report.rollouts] == [{"status": 404, "code": "turn_aborted"}] * 2
    assert [sample.status for sample in report.partial_samples] == [SampleStatus.ABORTED] * 2
    assert {sample.metadata["start_rollout_id"] for sample in report.partial_samples} == {7}
    assert len(left) == 2
    assert left < before
    assert seen == ("open", 2, [True, True, False, False])
    assert later.outcome.kind is OutcomeKind.TIMED_OUT


@pytest.mark.parametrize("agent", [ignore, think, IGNORING, "time.sleep(300)"])
async def test_only_their_agents_are_stopped(tmp_path: Path, agent):
    """Function or program; an agent of the same kind beside it continues, and ends with an abort of everything."""
    async with stage(tmp_path, ScriptStep(text="one")) as staged:
        staged.start(agent)
        staged.start(agent)
        await staged.running(2)
        first = await staged.manager.abort(staged.pending[:1], sessions=await sessions_of(staged, 0), budget=IMPATIENT)
        went_on = not staged.pending[1].done()
        rest = await staged.manager.abort(staged.pending[1:], budget=IMPATIENT)

        assert (staged.gate(), staged.sessions()) == ("open", 0)
    assert went_on
    assert (first.problems, rest.problems) == ((), ())
    assert [each.outcome.detail.partition(";")[0] for each in (*first.rollouts, *rest.rollouts)] == ["stopped"] * 2


async def test_two_managers_share_a_server(tmp_path: Path):
    """One ends surplus rollouts again and again; no turn of the 8 sessions of the other is refused or cut."""
    async with stage(tmp_path, SLOW) as staged, SessionManager(staged.server.url, grace_s=0.3, deadlines=FAST) as other:

        async def play_surplus(number: int) -> None:
            agent = as_agent(cooperate)
            tasks = [AgentTask(agent, "go", tmp_path / f"{number} {each}", "m", deadline_s=600) for each in range(3)]
            pending = [asyncio.create_task(other.run(task)) for task in tasks]
            await eventually(lambda: len(other.live) == 3)
            report = await other.abort(pending, sessions=list(other.live), budget=PATIENT)
            assert (report.problems, len(report.rollouts)) == ((), 3)

        for _ in range(8):
            staged.start(cooperate, session={"limits": {"turns": 3}}, deadline_s=600)
        for number in range(3):
            await play_surplus(number)
        rollouts = await asyncio.gather(*staged.pending)

    assert {rollout.outcome.kind for rollout in rollouts} == {OutcomeKind.LIMITED}
    assert {turn["status"] for rollout in rollouts for turn in rollout.session["turns"]} == {"completed"}
    assert {len(rollout.session["turns"]) for rollout in rollouts} == {3}
    assert {tuple(rollout.session["refusals"]) for rollout in rollouts} == {("limit_reached",)}


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ended=st.sets(st.integers(0, 5)), told=st.sampled_from(["once", "twice at once", "beside everything"]))
async def test_whoever_is_named_ends_and_nobody_else(tmp_path_factory, ended: set[int], told: str):
    """Any choice of sessions, by one abort or two at once; an abort of everything beside it takes the rest."""
    async with stage(tmp_path_factory.mktemp("stage"), HANGING, settings=NO_GRACE) as staged:
        for _ in range(6):
            staged.start(cooperate)
        await staged.generating(6)
        named = await sessions_of(staged, *ended)
        pending = [staged.pending[number] for number in sorted(ended)]
        aborts = [staged.manager.abort(pending, sessions=named, budget=PATIENT)]
        if told == "twice at once":
            aborts.append(staged.manager.abort(pending, sessions=named, budget=PATIENT))
        if told == "beside everything":
            aborts.append(staged.manager.abort(staged.pending, budget=PATIENT))
        reports = await asyncio.gather(*aborts)
        live = sum(not each.is_aborted for each in staged.engine.live)
        gone_on = [number for number, task in enumerate(staged.pending) if not task.done()]
        gate = staged.gate()

    expected = [] if told == "beside everything" else sorted({*range(6)} - ended)
    assert [report.problems for report in reports] == [()] * len(reports)
    assert (gone_on, live, gate) == (expected, len(expected), "open")
    assert {each.outcome.kind for report in reports for each in report.rollouts} <= {OutcomeKind.DRAINED}


async def test_sessions_are_kept_for_a_later_rollout(tmp_path: Path):
    """As in an abort of everything; the rollouts that continue have their sessions deleted at their end."""
    async with stage(tmp_path, ScriptStep(text="one"), HANGING) as staged:
        staged.start(cooperate)
        staged.start(think, deadline_s=0.5)
        await staged.generating()
        [kept] = await sessions_of(staged, 0)
        await staged.manager.abort(staged.pending[:1], sessions=[kept], budget=PATIENT, keep=Keep.SESSIONS)
        await staged.pending[1]
        held = staged.sessions()
        staged.start(cooperate, resumes=kept)
        await staged.generating()
        [successor] = staged.manager.live
        report = await staged.manager.abort(staged.pending[2:], sessions=[successor], budget=PATIENT)

    assert held == 1
    [sample] = report.partial_samples
    assert sample.metadata["turns"][:2] == [0, 1]


async def test_a_session_that_is_nowhere_and_a_server_that_is_gone(tmp_path: Path):
    """The first costs nothing, the second is a line of the report; the session is ended where it is."""
    async with stage(tmp_path, HANGING) as staged, canned_server(HANG_UP) as dead:
        staged.start(cooperate)
        await staged.generating()
        report = await abort_rollout(
            staged.pending,
            session_servers=[dead.url, staged.server.url],
            agent_hooks=[staged.manager.abort_hooks([*staged.manager.live])],
            sessions=[*staged.manager.live, "f" * 32],
            budget=replace(PATIENT, drain_s=1),
        )
        gone = await abort_rollout([], session_servers=[staged.server.url], sessions=["f" * 32], budget=PATIENT)
        none = await abort_rollout([], session_servers=[staged.server.url], sessions=[], budget=PATIENT)
        with pytest.raises(ScenarioError, match="expected a list of session ids"):
            await abort_rollout([], session_servers=[staged.server.url], sessions="f" * 32)

    [problem] = report.problems
    assert problem.startswith(f"drain {dead.url}: 2 of 2 sessions: ")
    assert [rollout.outcome.kind for rollout in report.rollouts] == [OutcomeKind.DRAINED]
    assert (gone.problems, none.problems) == ((), ())
