"""The choreography of an abort, step by step: what goes wrong costs its own time, and the gate is open afterwards."""

import asyncio
import errno
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.rollouts.agents.task import FunctionAgent
from harness.rollouts.client.connections import Connections, SessionServerAddress
from harness.rollouts.client.gate import GateClient, renew_holds
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort import _Abort, abort_rollout
from harness.rollouts.control.abort_report import AbortBudget, AbortStep, AgentHooks, Fate, Keep
from harness.rollouts.control.abort_scope import WholeServers
from harness.rollouts.control.engines import EngineInProcess, EngineServer
from harness.rollouts.control.quiesce import GATE_NOT_RESUMED
from harness.samples.rollout import OutcomeKind
from harness.server.settings import ServerSettings
from harness.types import SampleStatus
from tests.controllers.aborting import (
    IMPATIENT,
    PATIENT,
    cooperate,
    do_nothing,
    eventually,
    ignore,
    refuse_to_end,
    returning,
    stage,
    stubborn,
    think,
)
from tests.logged import capture_logs
from tests.session_servers.scripted import HANG_UP, SAY_NOTHING, UNREADABLE, canned_server, http_answer

SLOW = ScriptStep(text="A slow answer.", token_delay_s=0.05)
HANGING = ScriptStep(text="abc", fault=ScriptedFault.HANG, fault_after=2)
OPEN_GATE = {"state": "open", "epoch": 2, "held": 0, "sessions": 0, "turns_in_flight": 0}


async def test_a_rollout_that_is_cut_short_leaves_partial_samples(tmp_path: Path):
    """The turn in flight is aborted and answered 404; the agent ends by itself; nothing is left."""
    async with stage(tmp_path, ScriptStep(text="one"), HANGING) as staged:
        staged.start(cooperate)
        await eventually(lambda: len(staged.engine.live) == 1 and staged.engine.played.total() == 2)
        report = await staged.abort(rollout_id=7)

        assert (staged.gate(), staged.sessions(), len(staged.engine.live)) == ("open", 0, 0)
    [rollout] = report.rollouts
    [sample] = report.partial_samples
    assert report.problems == ()
    assert rollout.outcome.kind is OutcomeKind.DRAINED
    assert rollout.agent_result == {"status": 404, "code": "turn_aborted"}
    assert (sample.status, sample.metadata["turns"]) == (SampleStatus.ABORTED, [0, 1])
    assert sample.metadata["start_rollout_id"] == 7
    assert tuple(report.seconds) == tuple(AbortStep)


async def test_the_report_says_what_was_touched(tmp_path: Path):
    """Sessions, turns and held requests per server; workers and hooks by name."""
    async with stage(tmp_path, SLOW) as staged:
        for agent in (cooperate, cooperate, think):
            staged.start(agent)
        await staged.generating(2)
        await staged.running(3)
        report = await staged.abort(IMPATIENT)

    [drained] = report.drained
    assert (drained.url, drained.error, drained.gate.sessions_closed) == (staged.server.url, None, 3)
    assert drained.gate.turns_in_flight == 2
    assert [(answer.name, answer.error) for answer in report.engines] == [("in process", None)]
    assert [answer.error for answer in report.hooks] == [None]
    assert (report.turns_left, len(report.results), report.failures) == (0, 3, ())


async def test_a_rollout_that_had_ended_is_no_partial(tmp_path: Path):
    """Its samples are in its rollout; only what was cut short is reported apart."""

    async def once(base_url, **_):
        await cooperate(base_url)

    async with stage(tmp_path, ScriptStep(text="one"), HANGING) as staged:
        await staged.start(once, session={"limits": {"turns": 1}})
        staged.start(cooperate)
        await staged.generating()
        report = await staged.abort()

    assert [rollout.outcome.kind for rollout in report.rollouts] == [OutcomeKind.LIMITED, OutcomeKind.DRAINED]
    assert [sample.status for sample in report.partial_samples] == [SampleStatus.ABORTED]


async def test_nothing_is_kept_that_nobody_wants(tmp_path: Path):
    async with stage(tmp_path, HANGING) as staged:
        staged.start(cooperate)
        await staged.generating()
        report = await staged.abort(keep=Keep.NOTHING)

    assert (report.partial_samples, len(report.rollouts[0].samples)) == ((), 1)


async def test_an_agent_that_cannot_be_ended_is_reported(tmp_path: Path):
    """A function that ignores its cancellation costs its time; its rollout is collected all the same."""
    async with stage(tmp_path, grace_s=1) as staged:
        staged.start(refuse_to_end)
        await staged.running()
        report = await staged.abort(replace(PATIENT, agents_s=0.1, kill_s=0.2))

        assert (staged.gate(), staged.sessions()) == ("open", 0)
    [rollout] = report.rollouts
    assert "ignores its cancellation" in rollout.outcome.detail


async def test_a_rollout_without_a_session_ends_at_once(tmp_path: Path):
    """It waits for a gate that is shut; the abort ends the waiting, and the open gate does not let it in."""
    async with stage(tmp_path) as staged, SessionServerClient(staged.server.url) as client:
        somebody = client.gate()
        await somebody.drain(deadline_s=5)
        staged.start(cooperate)
        await asyncio.sleep(0.1)
        report = await staged.abort()
        assert staged.gate() == "draining"
        await somebody.resume(deadline_s=5)
        again = await staged.start(do_nothing)

        assert again.outcome.kind is OutcomeKind.NO_MODEL_CALL
    assert [(rollout.outcome.kind, rollout.session_id) for rollout in report.rollouts] == [(OutcomeKind.DRAINED, None)]


async def test_rollouts_that_begin_during_an_abort_begin_nothing(tmp_path: Path):
    """A group that starts its next rollout when one of them ends does not outlive the abort."""
    async with stage(tmp_path, HANGING) as staged:

        async def group():
            return [await staged.start(cooperate) for _ in range(3)]

        pending = asyncio.create_task(group())
        await staged.generating()
        report = await staged.abort(pending=[pending])

    assert [rollout.outcome.kind for rollout in report.rollouts] == [OutcomeKind.DRAINED] * 3
    assert [rollout.session_id is None for rollout in report.rollouts] == [False, True, True]
    assert report.problems == ()


# Session servers


@pytest.mark.parametrize("answer", UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_a_session_server_whose_answers_cannot_be_decoded_keeps_no_other_gate_shut(tmp_path: Path, answer: bytes):
    """It is reported; the others are drained and opened, and what is pending is collected."""
    async with stage(tmp_path, HANGING) as staged, canned_server(answer) as broken:
        staged.start(cooperate)
        await staged.generating()
        report = await staged.abort(servers=[broken.url, staged.server.url])

        assert staged.gate() == "open"
    assert [answer.error is None for answer in (*report.drained, *report.resumed)] == [False, True] * 2
    assert [rollout.outcome.kind for rollout in report.rollouts] == [OutcomeKind.DRAINED]


@pytest.mark.parametrize("first", [HANG_UP, http_answer(503, {"error": {"message": "later"}}), http_answer(500, {})])
async def test_a_drain_is_asked_for_again(first: bytes):
    """All verbs are idempotent, so whatever went wrong once may go right."""
    async with canned_server(first, http_answer(200, OPEN_GATE)) as server:
        report = await abort_rollout([], session_servers=[server.url], budget=PATIENT)

    assert server.requests[:2] == ["POST /sessions/drain"] * 2
    assert server.requests[-1] == "POST /sessions/resume"
    assert report.problems == ()


async def test_a_session_server_that_hangs_costs_its_time():
    async with canned_server(SAY_NOTHING) as server:
        report = await abort_rollout([], session_servers=[server.url], budget=replace(PATIENT, drain_s=1, resume_s=1))

    assert set(server.requests) == {"POST /sessions/drain", "POST /sessions/resume"}
    assert all(answer.error for answer in (*report.drained, *report.resumed))
    assert report.seconds[AbortStep.DRAIN] < 10


async def test_the_admin_token_goes_along(tmp_path: Path):
    """Without it a guarded server is not drained, and the report says why."""
    async with stage(tmp_path, settings=ServerSettings(admin_token="t0ken")) as staged:
        refused = await abort_rollout([], session_servers=[staged.server.url], budget=PATIENT)
        report = await abort_rollout(
            [], session_servers=[SessionServerAddress(staged.server.url, "t0ken")], budget=PATIENT
        )

    assert "401" in str(refused.drained[0].error)
    assert report.problems == ()


# Engines


async def test_an_engine_that_ends_nothing_costs_its_time(tmp_path: Path):
    """It accepts the abort and never answers the generation: the turn is still in flight, the agent is stopped."""
    async with canned_server(http_answer(200, {})) as engine, stage(tmp_path, HANGING) as staged:
        staged.start(ignore)
        await staged.generating()
        report = await staged.abort(replace(IMPATIENT, engines_s=2), workers=[EngineServer(engine.url)])

        assert (staged.gate(), staged.sessions()) == ("open", 0)
        await staged.engine.abort(None)
    assert [answer.error for answer in report.engines] == [None]
    assert (report.turns_left, len(report.rollouts)) == (1, 1)
    assert len(engine.requests) > 1
    assert "1 turns still in flight" in "\n".join(report.problems)


async def test_an_engine_that_fails_is_reported(tmp_path: Path):
    """And asked again while a turn is in flight; the other one does its work."""
    boom = http_answer(500, {"error": {"message": "boom"}})
    async with canned_server(boom) as engine, stage(tmp_path, HANGING) as staged:
        staged.start(cooperate)
        await staged.generating()
        workers = [EngineServer(engine.url, "sglang"), EngineInProcess(staged.engine)]
        report = await staged.abort(workers=workers)

        assert staged.gate() == "open"
    assert [answer.error is None for answer in report.engines] == [False, True]
    assert "boom" in str(report.engines[0].error)
    assert (report.turns_left, [rollout.outcome.kind for rollout in report.rollouts]) == (0, [OutcomeKind.DRAINED])


async def test_an_engine_whose_connection_hangs_costs_its_time(tmp_path: Path):
    async with canned_server(SAY_NOTHING) as engine, stage(tmp_path, HANGING) as staged:
        staged.start(cooperate)
        await staged.generating()
        workers = [EngineServer(engine.url), EngineInProcess(staged.engine)]
        report = await staged.abort(replace(PATIENT, engines_s=0.5), workers=workers)

        assert staged.gate() == "open"
    assert "did not answer within 0.35 s" in str(report.engines[0].error)
    assert (report.engines[1].error, report.turns_left, len(report.rollouts)) == (None, 0, 1)


async def test_looking_for_paused_engines_is_part_of_the_time_of_the_engines(tmp_path: Path):
    """However long each question may take: none of it is added to `engines_s`."""

    class Paused(EngineInProcess):
        given: ClassVar[list[float]] = []

        async def abort_all(self, *, deadline_s: float) -> None:
            Paused.given = [deadline_s]

        async def is_paused(self, *, deadline_s: float) -> bool:
            Paused.given.append(deadline_s)
            return True

        async def resume(self, *, deadline_s: float) -> None:
            Paused.given.append(deadline_s)

    async with stage(tmp_path) as staged:
        report = await staged.abort(workers=[Paused(staged.engine)], continue_engines=True)

    assert report.problems == ()
    assert len(Paused.given) == 3
    assert sum(Paused.given) <= PATIENT.engines_s


async def test_a_turn_that_an_abort_missed_is_told_again(tmp_path: Path):
    """It was on its way to the engine: the first abort found nothing."""

    class LateEngine(EngineInProcess):
        asked = 0

        async def abort_all(self, *, deadline_s: float) -> None:
            LateEngine.asked += 1
            if LateEngine.asked > 2:
                await super().abort_all(deadline_s=deadline_s)

    async with stage(tmp_path, HANGING) as staged:
        staged.start(cooperate)
        await staged.generating()
        report = await staged.abort(workers=[LateEngine(staged.engine)])

    assert LateEngine.asked > 2
    assert (report.turns_left, report.problems) == (0, ())


@pytest.mark.parametrize(
    ("kind", "requests"),
    [
        (None, ["POST /abort_request", "POST /abort_requests"]),
        ("sglang", ["POST /abort_request"]),
        ("vllm", ["POST /abort_requests"]),
    ],
)
async def test_a_worker_is_told_in_its_own_way(kind, requests):
    """By its kind; without one it is found out."""
    answers = [http_answer(404, {}), http_answer(200, {})] if kind is None else [http_answer(200, {})]
    async with canned_server(*answers) as engine:
        await EngineServer(engine.url, kind).abort_all(deadline_s=2)

    assert engine.requests == requests


async def test_a_server_that_is_no_engine_is_reported():
    async with canned_server(http_answer(404, {})) as engine:
        report = await abort_rollout([], session_servers=[], engine_workers=[f"vllm={engine.url}"], budget=PATIENT)

    assert engine.requests == ["POST /abort_requests"]
    assert "VLLM_SERVER_DEV_MODE" in str(report.engines[0].error)


# Hooks


async def test_hooks_are_called_in_the_order_of_the_steps(tmp_path: Path):
    """Mark, ask, end, clear; whatever they raise is reported."""
    called = []

    async def ask():
        called.append("abort")
        raise RuntimeError("no such agent")

    async def stop(seconds):
        called.append("stop")
        return ["agent 1"]

    hooks = AgentHooks("mine", lambda keep: called.append(f"mark {keep}"), ask, stop, lambda: called.append("clear"))
    report = await abort_rollout([], session_servers=[], agent_hooks=[hooks], budget=PATIENT)

    assert called == ["mark partial_samples", "abort", "stop", "clear"]
    assert report.hooks[0].error == "RuntimeError: no such agent"
    assert report.agents_left == ("agent 1",)


async def test_hooks_that_are_told_elsewhere_have_heard_before_the_next_step(tmp_path: Path):
    """A mark comes before the drain, after which a rollout would begin; a clear before the abort is over."""
    heard = []

    async def tell(word):
        for _ in range(20):
            await asyncio.sleep(0)
        heard.append(word)

    async def ask():
        heard.append("abort")

    hooks = AgentHooks("far", lambda _: tell("mark"), ask, None, lambda: tell("clear"))
    silent = AgentHooks("silent", lambda _: stubborn(2))
    budget = replace(PATIENT, hooks_s=1.0)  # the others tell theirs within it, on a busy machine too
    report = await abort_rollout([], session_servers=[], agent_hooks=[hooks, silent], budget=budget)

    assert heard == ["mark", "abort", "clear"]
    assert [(each.name, each.error) for each in report.hooks if each.error] == [("silent", "did not answer within 1 s")]


async def test_a_hook_that_raises_in_its_first_step_stops_nothing():
    def mark(keep):
        raise RuntimeError("gone")

    report = await abort_rollout(
        [returning(1)], session_servers=[], agent_hooks=[AgentHooks("mine", mark)], budget=PATIENT
    )

    assert (report.results, report.problems) == ((1,), ("hook mine: RuntimeError: gone",))


async def test_the_abort_function_of_an_agent_is_called_for_each_of_its_rollouts(tmp_path: Path):
    """With the session that it is to give up."""
    asked = []

    async def give_up(session_id, metadata, **kwargs):
        asked.append((session_id, metadata["number"], kwargs["where"]))

    agent = FunctionAgent("remote", lambda **_: think(), {"where": "there"}, give_up)
    async with stage(tmp_path) as staged:
        for number in range(2):
            staged.start(agent, metadata={"number": number})
        await staged.running(2)
        report = await staged.abort(replace(PATIENT, agents_s=0.1))

    assert sorted(asked, key=lambda each: each[1]) == [
        (rollout.session_id, number, "there") for number, rollout in enumerate(report.rollouts)
    ]


# Pending tasks


async def end(deaf: asyncio.Task[object]) -> None:
    """End a task that ignores its first cancellations."""
    for _ in range(3):
        deaf.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({deaf}, timeout=5)
    assert deaf.done()


async def test_tasks_that_fail_are_skipped():
    async def fail():
        raise ValueError("a malformed session")

    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    failing = asyncio.create_task(fail(), name="failing")
    report = await abort_rollout([returning(1), failing, cancelled, returning(2)], session_servers=[], budget=PATIENT)

    assert report.results == (1, 2)
    assert [(failure.name, failure.fate, failure.detail) for failure in report.failures] == [
        ("failing", Fate.RAISED, "ValueError: a malformed session"),
        ("future", Fate.CANCELLED, ""),
    ]


async def test_tasks_that_do_not_end_are_cancelled_and_those_that_ignore_it_are_left():
    hanging = asyncio.create_task(asyncio.sleep(3600), name="hanging")
    deaf = asyncio.create_task(stubborn(3600), name="deaf")
    budget = replace(PATIENT, agents_s=0.05, kill_s=0.05, collect_s=0.1, cancel_s=0.1)
    report = await abort_rollout([hanging, deaf, returning(1)], session_servers=[], budget=budget)

    assert report.results == (1,)
    assert {failure.name: failure.fate for failure in report.failures} == {"hanging": Fate.LATE, "deaf": Fate.LEFT}
    await end(deaf)


# The gate reopens


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3])
async def test_cancelling_an_abort_opens_the_gate(tmp_path: Path, after_s: float):
    """Wherever it stands: what was pending is cancelled, the gate opens, then the cancellation continues."""
    async with stage(tmp_path, HANGING) as staged:
        staged.start(ignore)
        await staged.generating()
        aborting = asyncio.create_task(staged.abort(replace(PATIENT, agents_s=5)))
        await eventually(lambda: staged.gate() == "draining")
        await asyncio.sleep(after_s)
        aborting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await aborting

        assert staged.gate() == "open"
        assert all(task.done() for task in staged.pending)
        assert (await staged.start(do_nothing)).outcome.kind is OutcomeKind.NO_MODEL_CALL


async def test_cancelling_again_and_again_opens_the_gate_all_the_same(tmp_path: Path):
    """The last step is not interrupted, and bounded: a caller that cancels at every tick has to wait for it."""
    async with stage(tmp_path) as staged:
        staged.pending.append(asyncio.create_task(stubborn(0.5)))
        aborting = asyncio.create_task(staged.abort(replace(PATIENT, agents_s=5)))
        await eventually(lambda: staged.gate() == "draining")
        while staged.gate() == "draining" and not aborting.done():
            aborting.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await aborting

        assert staged.gate() == "open"


async def test_a_hook_that_is_never_cleared_costs_what_is_left_of_the_last_step():
    """Also where a silent server has used that up: the time of another step is not given to it."""
    async with canned_server(SAY_NOTHING) as server:
        hooks = AgentHooks("far", clear=lambda: stubborn(1))
        budget = replace(PATIENT, drain_s=0.1, hooks_s=600, resume_s=0.3, cancel_s=0.1, total_s=1.0)
        async with asyncio.timeout(60):
            report = await abort_rollout([], session_servers=[server.url], agent_hooks=[hooks], budget=budget)

    [hook] = report.hooks
    assert str(hook.error).startswith("did not answer within 0")


class Nowhere(Connections):
    """To a server that nothing can be sent to: no descriptor is left in this process."""

    def __init__(self) -> None:
        super().__init__(SessionServerAddress("http://127.0.0.1:9"), silence_s=1)
        self.asked: list[str] = []

    async def ask(self, room, method, path, body=None, *, timeout_s):
        self.asked.append(path)
        raise OSError(errno.EMFILE, "no descriptor is left")

    def gate(self) -> GateClient:
        """On which a hold has been placed before."""
        gate = GateClient("http://127.0.0.1:9", self, "abort", ttl_s=0.03)
        gate.is_held = gate.may_be_held = True
        return gate


async def test_a_gate_that_cannot_be_told_is_in_the_report_and_the_others_are_told(tmp_path: Path):
    """Its error hides neither the report nor the error that the steps ended with, and hooks are cleared."""
    cleared = []
    hooks = AgentHooks("mine", clear=lambda: cleared.append("mine"))
    async with stage(tmp_path) as staged, SessionServerClient(staged.server.url) as server:
        gates = [Nowhere().gate(), server.gate("abort")]
        await gates[1].drain(deadline_s=5)
        abort = _Abort([], WholeServers(gates, [], continues=False), [hooks], PATIENT, time.monotonic())
        with capture_logs() as logged:
            await abort.leave_open()

        assert (staged.gate(), cleared) == ("open", ["mine"])
    [problem] = abort.report(Keep.NOTHING, None).problems
    assert problem == "resume http://127.0.0.1:9: OSError: [Errno 24] no descriptor is left"
    assert [each["url"] for each in logged if each["event"] == GATE_NOT_RESUMED] == ["http://127.0.0.1:9"]


async def test_a_hold_that_cannot_be_renewed_does_not_take_the_place_of_what_the_block_comes_to():
    """The server says at the end whether it was lost."""
    nowhere = Nowhere()

    async def work() -> None:
        async with renew_holds([nowhere.gate()]):
            await eventually(lambda: bool(nowhere.asked))
            raise KeyError

    with pytest.raises(KeyError):
        await work()
    async with renew_holds([nowhere.gate()]):
        await eventually(lambda: len(nowhere.asked) > 1)

    assert set(nowhere.asked) == {"/sessions/renew"}


# The budget


def test_the_time_to_reopen_is_never_given_away():
    """Whatever the steps before it cost; a call that ignores its end has to be over by then as well."""
    budget = AbortBudget(drain_s=10, cancel_s=5, resume_s=10, total_s=20)

    assert [budget.left_s(3, elapsed) for elapsed in (0, 2, 4, 4.8, 5, 100)] == pytest.approx([3, 2.8, 0.8, 0.1, 0, 0])
    assert budget.working_s + budget.cancel_s + budget.resume_s == budget.total_s


async def test_the_total_bounds_all_steps_together(tmp_path: Path):
    """Servers, engines and tasks that all hang: over after the total, and the gate was told to open."""
    async with canned_server(SAY_NOTHING) as server, canned_server(SAY_NOTHING) as engine:
        budget = replace(PATIENT, drain_s=0.4, cancel_s=0.1, resume_s=0.3, total_s=1.0)
        deaf = asyncio.create_task(stubborn(60))
        report = await abort_rollout([deaf], session_servers=[server.url], engine_workers=[engine.url], budget=budget)

    assert server.requests[-1] == "POST /sessions/resume"
    assert report.seconds[AbortStep.COLLECT] < 30
    assert report.failures[0].fate is Fate.LEFT
    await end(deaf)
