"""An update of the weights: its order, what it reports, and that everything is open again whatever happens (I8)."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from harness.engines.base import PauseMode
from harness.engines.pool.pool import EnginePool
from harness.engines.pool.workers import MISSED_UPDATE, UNSETTLED
from harness.engines.scripted import ScriptStep, scripted_logprobs
from harness.errors import EngineError, EngineRejected, ScenarioError
from harness.rollouts.control.sample_sweep import sweep_samples
from harness.rollouts.control.weights import WeightUpdater
from harness.rollouts.control.weights_report import UpdateBudget, UpdateReport, UpdateStep
from harness.samples.codec import sample_from_json
from harness.samples.versions import unsettled_label
from harness.sessions.weights.weight_update import SweepRequest
from harness.types import Sample, as_ids
from tests.builders import user
from tests.controllers.noting_engine import CHECKPOINT, NotingEngine
from tests.session_servers.served import Client, eventually, serving_with

PATIENT = UpdateBudget(sweep_s=2, gate_s=20, pause_s=20, apply_s=20, verify_s=20, continue_s=20)


def pairs(sample) -> list[tuple[float, int]]:
    """(proximal logprob, its version) of every sampled token."""
    columns = zip(sample["proximal_logprobs"], sample["proximal_versions"], sample["behavior_versions"], strict=True)
    return [(value, version) for value, version, behavior in columns if behavior >= 0]


def truth(sample, versions: Sequence[int]) -> list[tuple[float, int]]:
    """The logprob of every sampled token under the version given for it."""
    start = len(sample["tokens"]) - sample["response_length"]
    sampled = [start + i for i, behavior in enumerate(sample["behavior_versions"]) if behavior >= 0]
    tokens = as_ids(sample["tokens"])
    return [
        (float(scripted_logprobs(tokens[at : at + 1], at, str(version))[0]), version)
        for at, version in zip(sampled, versions, strict=True)
    ]


async def sampled(client: Client, sessions: int = 1, **fields) -> list[Sample]:
    """The samples of sessions with one turn each, which are gone from the server."""
    samples = []
    for _ in range(sessions):
        session = await client.create()
        await client.say(session, [user("a")], **fields)
        samples += [sample_from_json(sample) for sample in await client.samples(session)]
        await client.http.delete(f"/sessions/{session.session_id}")
    return samples


async def update_to(version: int, engines, servers, applied=CHECKPOINT, **how) -> UpdateReport:
    """The report of an update that goes through to its end."""
    async with WeightUpdater(engines, servers, **how).update(version) as update:
        await update.apply(applied)
    return update.report


async def test_an_update_sweeps_pauses_applies_and_opens_in_this_order(engine, client):
    """The second update sweeps what the version before it sampled; the gate is shut exactly while engines are."""
    session = await client.create()
    await client.say(session, [user("a")])
    updater = WeightUpdater([engine], [client.url])
    gates = []
    for version in (1, 2):
        async with updater.update(version) as update:
            gates.append((await client.gate())["state"])
            await update.apply(CHECKPOINT)
        gates.append((await client.gate())["state"])

    assert engine.events == ["pause abort", "update 1", "resume", "score", "pause abort", "update 2", "resume"]
    assert gates == ["paused", "open", "paused", "open"]
    assert engine.weight_version == "2"
    assert update.report.problems == ()
    assert [worker.weight_version for worker in update.report.workers] == ["2"]
    [sample] = await client.samples(session)
    assert pairs(sample) == truth(sample, [1] * len(pairs(sample)))


async def test_keep_freezes_a_turn_and_scores_nothing_of_it():
    """One request samples under two versions; what it sampled before the update is left to the next sweep."""
    engine = NotingEngine(ScriptStep(text="0123456789", token_delay_s=0.05))
    async with serving_with(engine) as client:
        session = await client.create()
        asking = asyncio.create_task(client.chat(session, [user("a")]))
        await eventually(lambda: any(live.sampled > 2 for live in engine.live))

        await update_to(1, [engine], [client.url], mode=PauseMode.KEEP)

        assert (await asking).status_code == 200
        [sample] = await client.samples(session)
        behavior = [version for version in sample["behavior_versions"] if version >= 0]
        assert set(behavior) == {0, 1}
        assert [version for _, version in pairs(sample)] == behavior
        assert sample["metadata"]["weight_updates"] == {"keep": 1}
        assert engine.events == ["pause keep", "update 1", "resume"]


class Mixing(NotingEngine):
    """Reads its input in pieces: what weights come in between have computed a part of every scoring."""

    answers_scores = False

    async def generate(self, request):
        """See `TokenProvider`; a scoring carries the version of the first sampled token, whatever it is made of."""
        result = await super().generate(request)
        if result.prompt_logprobs is None or not self.answers_scores:
            return structs.replace(result, prompt_logprobs=None)
        mixed = np.full_like(result.prompt_logprobs.logprobs, -0.5)
        return structs.replace(result, prompt_logprobs=replace(result.prompt_logprobs, logprobs=mixed))


async def test_a_scoring_that_spans_two_versions_is_discarded():
    """Weights change while a request reads its input: it is labeled with the new version and settles nothing.

    It was asked to score from the first turn on, which waits for version 1; the second turn, which version 1 sampled,
    lies in the same window.
    """
    engine = Mixing(ScriptStep(text="one"), ScriptStep(text="two"), ScriptStep(text="three", delay_s=0.3))
    async with serving_with(engine) as client:
        session = await client.create()
        history = [user("a"), await client.say(session, [user("a")]), user("b")]
        await engine.update_weights(CHECKPOINT, "1")
        history += [await client.say(session, history), user("c")]
        engine.answers_scores = True
        asking = asyncio.create_task(client.chat(session, history))
        await client.turns_in_flight(1)

        await engine.pause(PauseMode.KEEP)
        await engine.update_weights(CHECKPOINT, "2")
        await engine.resume()

        assert (await asking).status_code == 200
        [sample] = await client.samples(session)
        assert set(sample["behavior_versions"]) == {-1, 0, 1, 2}
        assert sample["proximal_versions"] == sample["behavior_versions"]


async def test_a_worker_that_cannot_load_is_fenced_and_reported(workers, pooled):
    """The others serve every session from then on; when a later update reaches it, it serves again."""
    workers[1].fails["update"] = EngineRejected("does not fit")
    pool = pooled.engine
    report = await update_to(1, [pool], [pooled.url])
    sessions = [await pooled.create() for _ in range(4)]
    for session in sessions:
        await pooled.say(session, [user("a")])
    versions = [(await pooled.samples(session))[0]["weight_versions"] for session in sessions]
    fenced = [worker.fence for worker in pool.workers]
    workers[1].fails.clear()
    later = await update_to(2, [pool], [pooled.url])

    assert versions == [["1"]] * 4
    assert fenced == ["", MISSED_UPDATE]
    assert [(worker.error is None, worker.is_fenced) for worker in report.workers] == [(True, False), (False, True)]
    assert "does not fit" in report.problems[0]
    assert report.servers[0].weights.fenced == {"1": "0"}
    assert [worker.fence for worker in pool.workers] == ["", ""]
    assert later.problems == ()


async def test_a_worker_that_an_update_has_settled_serves_although_another_does_not_go_on():
    """The pool judges its workers when all have gone on; until then this one would be the only one that could serve."""
    workers = [NotingEngine(), NotingEngine()]
    async with EnginePool(workers) as pool:
        workers[1].relabel(unsettled_label("1"))
        await pool.read_version()
        assert [worker.fence for worker in pool.workers] == ["", UNSETTLED]
        workers[0].fails["resume"] = EngineError("500")
        await update_to(2, [pool], [], budget=replace(PATIENT, continue_s=0.2))

        assert [worker.fence for worker in pool.workers] == ["", ""]


async def test_a_server_whose_only_engine_missed_the_update_is_named_as_a_problem():
    """It fences nothing that it cannot replace, so its sessions continue under the old weights, and the report says so.

    The same line tells of an engine that the updater was not given.
    """
    updated, forgotten = NotingEngine(), NotingEngine()
    async with serving_with(updated) as client, serving_with(forgotten) as behind:
        report = await update_to(1, [updated], [client.url, behind.url])

        [problem] = report.problems
        assert problem.startswith(f"{behind.url}: sessions are served by scripted under weight version '0'")


async def test_an_update_that_no_worker_took_is_an_error_and_the_old_weights_serve(workers, pooled):
    """Nobody is fenced: better the old weights than none."""
    for worker in workers:
        worker.fails["update"] = EngineRejected("does not fit")
    with pytest.raises(EngineError, match=r"no worker serves weight version 1.*does not fit"):
        await update_to(1, [pooled.engine], [pooled.url])

    assert (await pooled.gate())["state"] == "open"
    assert await pooled.say(await pooled.create(), [user("a")])
    assert [worker.fence for worker in pooled.engine.workers] == ["", ""]


async def test_whatever_the_block_raises_everything_opens_again(engine, client):
    with pytest.raises(ZeroDivisionError):
        async with WeightUpdater([engine], [client.url]).update(1):
            _ = 1 / 0

    assert engine.events == ["pause abort", "resume"]
    assert (await client.gate())["state"] == "open"
    assert await client.say(await client.create(), [user("a")])


async def test_a_cancelled_update_opens_everything_again(engine, client):
    """The cancellation comes through, after the gates are open, whoever cancels at every tick until then."""
    engine.fails["update"] = None
    updating = asyncio.create_task(update_to(1, [engine], [client.url]))
    await eventually(lambda: "update 1" in engine.events)
    while client.server.gatekeeper.gate.holds and not updating.done():
        updating.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await updating

    assert engine.events[-1] == "resume"
    assert (await client.gate())["state"] == "open"


@pytest.mark.parametrize(("verb", "step"), [("pause", "pause_s"), ("update", "apply_s"), ("resume", "continue_s")])
async def test_an_engine_that_never_answers_costs_its_budget_and_the_gates_open(workers, pooled, verb, step):
    """One of two workers hangs in one of the verbs."""
    workers[1].fails[verb] = None
    report = await update_to(1, workers, [pooled.url], budget=replace(PATIENT, **{step: 0.2}))

    assert (await pooled.gate())["state"] == "open"
    assert any("did not answer within" in problem for problem in report.problems)
    assert report.updated
    workers[1].fails.clear()
    await workers[1].resume()


async def test_an_engine_that_never_scores_costs_the_sweep_its_budget_and_no_more(engine, client):
    """What was not reached is counted in the report."""
    await client.say(await client.create(), [user("a")])
    await engine.update_weights(CHECKPOINT, "1")
    engine.fails["score"] = None
    budget = UpdateBudget(sweep_s=0.05)

    report = await update_to(2, [engine], [client.url], budget=budget)

    sweep = report.servers[0].sweep
    assert sweep.tokens_left == sweep.tokens_waiting > 0
    assert "were not scored and keep their behavior values" in report.problems[0]
    assert report.telemetry()["weights/proximal_tokens_left"] == sweep.tokens_left
    assert engine.weight_version == "2"


async def test_samples_that_wait_for_a_trainer_meet_their_next_version_too(engine, client):
    """The queue of the trainer is swept; what it has taken meanwhile is left to it, and so is what cannot be scored."""
    queue = await sampled(client, 3)
    await engine.update_weights(CHECKPOINT, "1")
    before = list(queue)
    engine.may_score.clear()

    async def take_one() -> None:
        await eventually(lambda: engine.events.count("score") == 3)
        queue.pop(0)
        engine.may_score.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(take_one())
        report = await update_to(2, [engine], [client.url], unconsumed=queue)

    assert [set(sample.proximal_versions.tolist()) for sample in (before[0], *queue)] == [{0}, {1}, {1}]
    assert report.samples.tokens_settled == sum(sample.response_length for sample in queue)
    assert report.samples.tokens_left == before[0].response_length


async def test_an_engine_that_never_answers_keeps_no_sample_from_the_others():
    """It holds the requests of its own share; the rest of the queue is scored by the engine that works."""
    engine, silent = NotingEngine(), NotingEngine()
    silent.may_score.clear()
    async with serving_with(engine) as client:
        queue = await sampled(client, 12)
    await engine.update_weights(CHECKPOINT, "1")
    await silent.update_weights(CHECKPOINT, "1")

    sweeping = asyncio.create_task(sweep_samples([engine, silent], queue, SweepRequest(1, concurrency=4)))
    await eventually(lambda: (engine.events + silent.events).count("score") == 12)
    silent.may_score.set()
    report = await sweeping

    assert silent.events.count("score") <= 2
    assert (report.sessions_done, report.tokens_left) == (12, 0)


async def test_a_sample_whose_logprobs_are_on_no_prompts_scale_is_counted_and_left_alone(engine, client):
    """A least length forbade tokens when it was sampled; what an engine scores knows nothing of that."""
    queue = await sampled(client, min_tokens=1)
    await engine.update_weights(CHECKPOINT, "1")

    report = await update_to(2, [engine], [client.url], unconsumed=queue)

    assert set(queue[0].proximal_versions.tolist()) == {0}
    assert (report.samples.tokens_waiting, report.samples.requests) == (0, 0)
    assert report.samples.tokens_incomparable == queue[0].response_length


async def test_a_sample_that_fills_the_context_is_scored_but_for_its_last_token(engine, client):
    """As in a session: servers read no input that leaves no room for a token, and what is left is counted."""
    queue = await sampled(client)
    await engine.update_weights(CHECKPOINT, "1")
    engine.capabilities = replace(engine.capabilities, context_length=queue[0].tokens.size)

    report = await update_to(2, [engine], [client.url], unconsumed=queue)

    [sample], report = queue, report.samples
    assert sample.proximal_versions.tolist() == [1] * (sample.response_length - 1) + [0]
    assert (report.tokens_settled, report.tokens_left) == (sample.response_length - 1, 1)


async def test_an_update_without_time_for_a_sweep_leaves_it_out(engine, client):
    """Nothing is scored, nothing is asked of the session server before the pause."""
    await client.say(await client.create(), [user("a")])
    await engine.update_weights(CHECKPOINT, "1")

    report = await update_to(2, [engine], [client.url], budget=UpdateBudget(sweep_s=0))

    assert "score" not in engine.events
    assert report.servers[0].sweep is None
    assert report.problems == ()


async def test_a_session_server_that_is_gone_is_reported_and_the_others_are_updated(engine, client):
    gone = "http://127.0.0.1:9"
    budget = UpdateBudget(sweep_s=3, gate_s=3, verify_s=3)
    report = await update_to(1, [engine], [gone, client.url], budget=budget)

    assert set(report.servers[0].errors) == {
        UpdateStep.SWEEP,
        UpdateStep.PAUSE_GATES,
        UpdateStep.VERIFY,
        UpdateStep.RESUME_GATES,
    }
    assert report.servers[1].errors == {}
    assert engine.weight_version == "1"


@pytest.mark.parametrize("sweep_s", [0, 5])
async def test_going_back_in_versions_is_refused_before_anything_is_touched(workers, pooled, sweep_s):
    """One failing worker would have fenced all that took the lower version; the live one may be applied again."""
    session = await pooled.create()
    await pooled.say(session, [user("a")])
    await pooled.engine.update_weights(CHECKPOINT, "7")
    for worker in workers:
        worker.events.clear()
    updater = WeightUpdater([pooled.engine], [pooled.url], budget=UpdateBudget(sweep_s=sweep_s))

    with pytest.raises(
        ScenarioError, match=r"version 7, which is live, or a later one, got 3: .* 8 is next; .* restarts"
    ):
        async with updater.update(3):
            pytest.fail("the block ran")

    assert [worker.events for worker in workers] == [[], []]
    assert [worker.fence for worker in pooled.engine.workers] == ["", ""]
    assert (await pooled.gate())["state"] == "open"
    for version in (7, 8):
        async with updater.update(version) as update:
            await update.apply(CHECKPOINT)
        assert update.report.problems == ()


async def test_a_worker_that_has_gone_ahead_counts_as_live(workers, pooled):
    """Of a pool whose workers disagree the newest version decides: the lower one would be of who missed an update."""
    await workers[1].update_weights(CHECKPOINT, "7")

    with pytest.raises(ScenarioError, match="got 3"):
        async with WeightUpdater([pooled.engine], [pooled.url]).update(3):
            pytest.fail("the block ran")


async def test_a_transfer_of_the_callers_own_is_verified_like_a_checkpoint(workers, pooled):
    """It gets every worker by name; one that it forgot to label is fenced."""

    async def transfer(providers, label) -> None:
        assert list(providers) == ["0", "1"]
        await providers["0"].update_weights(CHECKPOINT, label)

    report = await update_to(7, [pooled.engine], [pooled.url], applied=transfer)

    assert [worker.fence for worker in pooled.engine.workers] == ["", MISSED_UPDATE]
    assert report.workers[1].error == "it reports weight version '0', expected '7'"


async def test_a_transfer_that_breaks_off_leaves_no_worker_of_unknown_weights_serving(workers, pooled):
    """What it had reached is verified before anything opens."""

    async def transfer(providers, label) -> None:
        await providers["0"].update_weights(CHECKPOINT, label)
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await update_to(7, [pooled.engine], [pooled.url], applied=transfer)

    assert [worker.fence for worker in pooled.engine.workers] == ["", MISSED_UPDATE]
    assert (await pooled.gate())["state"] == "open"


async def test_a_second_attempt_that_breaks_off_is_verified_like_the_first(workers, pooled):
    """What the first one found out says nothing about what the second has reached."""
    for worker in workers:
        worker.fails["update"] = EngineRejected("does not fit")

    async def transfer(providers, label) -> None:
        workers[0].fails.clear()
        await providers["0"].update_weights(CHECKPOINT, label)
        raise ConnectionResetError

    async def twice() -> None:
        async with WeightUpdater([pooled.engine], [pooled.url]).update(1) as update:
            with pytest.raises(EngineError):
                await update.apply(CHECKPOINT)
            await update.apply(transfer)

    with pytest.raises(ConnectionResetError):
        await twice()

    assert [worker.fence for worker in pooled.engine.workers] == ["", MISSED_UPDATE]


async def test_the_report_names_the_pause_and_the_sweep_apart(engine, client):
    report = await update_to(1, [engine], [client.url])

    seconds = report.seconds
    assert set(seconds) == set(UpdateStep)
    assert np.isclose(report.pause_s, sum(seconds.values()) - seconds[UpdateStep.SWEEP])
