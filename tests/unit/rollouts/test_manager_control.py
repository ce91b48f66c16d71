"""A manager that knows its engines ends, pauses and updates its rollouts in one line each."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engines.base import TokenProvider
from harness.engines.scripted import ScriptStep
from harness.errors import ScenarioError
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.abort_report import Fate, Keep
from harness.rollouts.control.engines import EngineInProcess, EngineServer, as_workers
from harness.rollouts.control.weights_report import UpdateBudget
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import OutcomeKind
from harness.server.settings import ServerSettings
from harness.types import SampleStatus
from tests.controllers.aborting import FAST, IMPATIENT, PATIENT, call, do_nothing, stage, stubborn

UPDATE = UpdateBudget(sweep_s=2, gate_s=20, pause_s=20, apply_s=20, verify_s=20, continue_s=20)


async def test_a_rollout_stands_still_for_the_time_of_a_block(tmp_path: Path):
    """Its agent does not notice: the turn that was cut short continues as the same turn."""
    answers = []

    async def ask(base_url, **_):
        answers.append(await call(base_url, [{"role": "user", "content": "go"}]))

    async with stage(tmp_path, ScriptStep(text="A slow answer.", token_delay_s=0.02)) as staged:
        running = staged.start(ask)
        await staged.generating()
        async with staged.manager.paused(PATIENT) as report:
            assert (staged.gate(), len(staged.engine.live), report.problems) == ("paused", 0, ())
            assert not running.done()
        rollout = await running

    assert rollout.outcome.kind is OutcomeKind.FINISHED
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == ["A slow answer."]
    assert [sample.status for sample in rollout.samples] == [SampleStatus.COMPLETED]


@pytest.mark.parametrize("form", ["a checkpoint", "a transfer"])
async def test_weights_change_under_a_rollout_in_one_line(tmp_path: Path, form: str):
    """The turn in flight continues under the new ones, and its tokens say which were whose."""

    async def transfer(workers: Mapping[str, TokenProvider], label: str) -> None:
        for worker in workers.values():
            await worker.update_weights(tmp_path, label)

    async def ask(base_url, **_):
        await call(base_url, [{"role": "user", "content": "go"}])

    async with stage(tmp_path, ScriptStep(text="A slow answer.", token_delay_s=0.02)) as staged:
        running = staged.start(ask)
        await staged.generating()
        async with staged.manager.updating_weights(3, budget=UPDATE) as update:
            await update.apply(tmp_path if form == "a checkpoint" else transfer)
        [sample] = (await running).samples

        assert (staged.gate(), staged.engine.weight_version) == ("open", "3")
    assert update.report.problems == ()
    assert sample.status is SampleStatus.COMPLETED
    assert {int(version) for version in sample.behavior_versions} >= {3}


async def test_a_manager_opens_its_guarded_server_with_its_own_token(tmp_path: Path):
    """An abort, a pause and an update find the gate of a server that wants a token."""
    settings = ServerSettings(admin_token="t0ken")
    async with (
        stage(tmp_path, settings=settings) as staged,
        SessionManager(staged.server.url, admin_token="t0ken", engines=[staged.engine], deadlines=FAST) as manager,
    ):
        async with manager.paused(PATIENT) as paused, manager.updating_weights(1, budget=UPDATE) as update:
            await update.apply(tmp_path)
        aborted = await manager.abort([], budget=PATIENT)

    assert (paused.problems, update.report.problems, aborted.problems) == ((), (), ())


async def test_a_manager_that_knows_no_engines_ends_its_rollouts_all_the_same(tmp_path: Path):
    """Sessions close; what an engine has of them runs to its end."""
    async with stage(tmp_path) as staged, SessionManager(staged.server.url, deadlines=FAST) as manager:
        done = staged.start(do_nothing)
        await asyncio.wait([done])
        report = await manager.abort([done], budget=PATIENT)

    assert (report.problems, report.engines) == ((), ())


async def test_nothing_begins_between_the_ends_of_two_aborts_at_once(tmp_path: Path):
    """The first to end lets nothing begin under the other, which has to wait for it then."""
    async with stage(tmp_path) as staged:
        first, second = staged.manager.abort_hooks(), staged.manager.abort_hooks()
        for hooks in (first, second):
            hooks.mark(Keep.SAMPLES)
        first.clear()
        between = await staged.start(do_nothing)
        second.clear()
        after = await staged.start(do_nothing)

    assert (between.outcome.kind, between.session_id) == (OutcomeKind.DRAINED, None)
    assert after.outcome.kind is OutcomeKind.NO_MODEL_CALL


async def test_what_ignores_its_cancellation_is_not_gathered(tmp_path: Path):
    """It is reported apart, behind the failures of those that have ended; the bound holds."""

    async def fail() -> None:
        raise ValueError("a malformed session")

    deaf = asyncio.create_task(stubborn(30), name="deaf")
    failing = asyncio.create_task(fail(), name="failing")
    async with stage(tmp_path) as staged:
        done = staged.start(do_nothing)
        await asyncio.wait([done])
        budget = replace(IMPATIENT, kill_s=0.1, collect_s=0.5, cancel_s=0.5)
        report = await abort_rollout([deaf, failing, done], session_servers=[staged.server.url], budget=budget)
    while not deaf.done():
        deaf.cancel()
        await asyncio.sleep(0)

    assert [(failure.name, failure.fate) for failure in report.failures] == [
        ("failing", Fate.RAISED),
        ("deaf", Fate.LEFT),
    ]
    assert [rollout.outcome.kind for rollout in report.rollouts] == [OutcomeKind.NO_MODEL_CALL]


async def test_engines_are_named_as_one_has_them(tmp_path: Path):
    """Addresses, engine servers, workers and providers: each verb makes of them what it needs."""
    async with stage(tmp_path) as staged:
        worker = EngineInProcess(staged.engine)
        made = as_workers(["http://a", "vllm=http://b", EngineServer("http://c"), worker, staged.engine])

    assert made == (
        EngineServer("http://a"),
        EngineServer("http://b", "vllm"),
        EngineServer("http://c"),
        worker,
        EngineInProcess(staged.engine),
    )


async def test_an_engine_whose_kind_nobody_knows_takes_no_weights(tmp_path: Path):
    """Ending its requests can be tried out, loading weights cannot."""
    async with stage(tmp_path) as staged:
        manager = SessionManager(staged.server.url, engines=[EngineServer("http://127.0.0.1:9")])
        with pytest.raises(ScenarioError, match="sglang=URL or vllm=URL"):
            async with manager, manager.updating_weights(1):
                pytest.fail("the block ran")
        assert staged.gate() == "open"
