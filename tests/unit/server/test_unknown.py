"""What engines may have sampled and did not hand over stands beside the ledger's sum, wherever the ledger is shown."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import pytest

from harness.engines.pool.pool import EnginePool
from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.server.settings import ServerSettings
from harness.types import GenerationDelta, GenerationRequest, GenerationResult
from tests.builders import user
from tests.fake_engines.fake_server import serving as serving_fake
from tests.fake_engines.lies import Lie
from tests.fake_engines.providers import fake_provider, make_fake, scripted_engine
from tests.session_servers.served import Client, Served, eventually, says, serving, serving_with
from tests.session_servers.store_file import ledger_of, read_file

HI = [user("hi")]
BREAKS = ScriptStep(text="some words", fault=ScriptedFault.DISCONNECT)
"""Before anything has come."""
QUICK = ServerSettings(engine_retry_s=0.01)


async def unknown_of(client: Client, session: Served) -> tuple[int, int]:
    """Of the session's ledger, which has to balance: requests and tokens."""
    ledger = (await client.record(session))["ledger"]
    assert ledger["generated"] == ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
    return ledger["unknown"]["requests"], ledger["unknown"]["tokens"]


async def test_a_request_whose_connection_broke_is_unknown_up_to_its_budget():
    """The turn is answered by a request of its own; the page of metrics counts both sides."""
    async with serving(BREAKS, *says("fine"), settings=QUICK) as client:
        session = await client.create(sampling={"max_tokens": 20})
        message = await client.say(session, HI)
        counted = await unknown_of(client, session)
        [turn] = (await client.record(session))["turns"]
        page = (await client.http.get("/metrics")).text

    [lost] = turn["unknown"]
    assert (message["content"], counted) == ("fine", (1, 20))
    assert (lost["at_most"], lost["reason"]) == (20, "engine_connection_lost")
    assert lost["request_id"] not in [segment["request_id"] for segment in turn["segments"]]
    assert "harness_unknown_requests_total 1.0" in page
    assert "harness_unknown_tokens_total 20.0" in page


async def test_an_engine_that_goes_away_in_the_middle_is_not_replaced_in_its_request():
    """Another one of the pool is asked by a request of its own; what both have sampled is in the ledger, or unknown."""
    goes = scripted_engine(ScriptStep(text="some words", fault=ScriptedFault.UNAVAILABLE, fault_after=3))
    stays = scripted_engine(*says("some words"))
    pool = EnginePool([goes, stays])
    async with serving_with(pool, settings=ServerSettings(engine_retry_s=0.01)) as client:
        session = await client.create(sampling={"max_tokens": 20})
        message = await client.say(session, HI)
        requests, tokens = await unknown_of(client, session)
        generated = (await client.record(session))["ledger"]["generated"]
    sampled = (await goes.count_sampled()).tokens + (await stays.count_sampled()).tokens

    assert (message["content"], requests) == ("some words", 1)
    assert 0 <= sampled - generated <= tokens


@pytest.mark.parametrize("fault", [ScriptedFault.UNAVAILABLE, ScriptedFault.REJECT])
async def test_an_engine_that_took_no_request_has_sampled_nothing(fault):
    """It said so."""
    async with serving(ScriptStep(text="x", fault=fault), settings=ServerSettings(engine_attempts=1)) as client:
        session = await client.create()
        failed = await client.chat(session, HI)
        counted = await unknown_of(client, session)

    assert failed.status_code in (400, 503)
    assert counted == (0, 0)


async def test_an_answer_of_weights_that_nobody_can_name_is_unknown():
    """It has come, but no look at the label behind it, which this API needs, is answered: dropped, and more may be."""
    fake = make_fake("vllm-completions", scripted_engine(*says("fine")))
    sample = fake._sampled

    async def sample_and_fall_silent(
        request: GenerationRequest, interval: int
    ) -> AsyncGenerator[GenerationDelta | GenerationResult]:
        fake.is_silent = True
        async for piece in sample(request, interval):
            yield piece

    async with (
        serving_fake(fake, notices_disconnects=True),
        serving_with(fake_provider(fake), settings=ServerSettings(engine_attempts=1)) as client,
    ):
        session = await client.create(sampling={"max_tokens": 20})
        fake._sampled = sample_and_fall_silent  # type: ignore[method-assign]
        failed = await client.chat(session, HI)
        fake.is_silent = False
        counted, ledger = await unknown_of(client, session), (await client.record(session))["ledger"]

    assert (failed.status_code, counted) == (502, (1, 15))
    assert (ledger["generated"], ledger["dropped"]) == (5, {"unversioned": 5})


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_of_an_engine_that_says_more_than_it_was_asked_for_everything_is_dropped(kind: str):
    """All of it has come, and none of it is believed: nothing more is unknown."""
    fake = make_fake(kind, scripted_engine(*says("fine")))
    async with (
        serving_fake(fake, notices_disconnects=kind == "vllm"),
        serving_with(fake_provider(fake), settings=ServerSettings(engine_attempts=1)) as client,
    ):
        session = await client.create(sampling={"max_tokens": 20})
        fake.lie = Lie.TOO_MANY_TOKENS
        failed = await client.chat(session, HI)
        counted, ledger = await unknown_of(client, session), (await client.record(session))["ledger"]

    assert (failed.status_code, counted) == (502, (1, 0))
    assert ledger["generated"] > 20
    assert ledger["dropped"] == {"invalid_reply": ledger["generated"]}


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_request_that_an_engine_gave_up_while_it_ran_is_unknown(workers: int):
    """SGLang calls itself unavailable then. Another worker is asked for the turn, by a request of its own."""
    fakes = [make_fake("sglang", scripted_engine(*says("fine"))) for _ in range(workers)]
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(serving_fake(fake, notices_disconnects=False))
        pool = EnginePool([fake_provider(fake) for fake in fakes])
        settings = ServerSettings(engine_attempts=workers, engine_retry_s=0.01)
        client = await stack.enter_async_context(serving_with(pool, settings=settings))
        session = await client.create(sampling={"max_tokens": 20})
        fakes[0].lie = Lie.ABORT_503
        answered = await client.chat(session, HI)
        requests, tokens = await unknown_of(client, session)

    assert (requests, 0 < tokens <= 20) == (1, True)
    assert workers == 1 or answered.status_code == 200


async def test_a_turn_that_is_asked_for_again_brings_what_was_unknown_along(tmp_path):
    """Over a restart too: counted once, on disk as in memory, and by the successor of its session."""
    path, settings = tmp_path / "s.db", ServerSettings(engine_attempts=1)
    async with serving(BREAKS, store=path, settings=settings) as client:
        session = await client.create(sampling={"max_tokens": 20})
        failed = await client.chat(session, HI)
    async with serving(BREAKS, *says("fine"), store=path, settings=QUICK) as client:
        restored = await unknown_of(client, session)
        message = await client.say(session, HI)
        counted, record = await unknown_of(client, session), await client.record(session)
        stored = ledger_of(read_file(path)[session.session_id])
        page = (await client.http.get("/metrics")).text
        await client.http.post(f"/sessions/{session.session_id}/end")
        successor = await client.create(resumes=session.session_id)
        inherited = await unknown_of(client, successor)

    assert (failed.status_code, message["content"]) == (502, "fine")
    assert (restored, counted, inherited) == ((1, 20), (2, 40), (2, 40))
    assert stored == record["ledger"]
    assert "harness_unknown_tokens_total 20.0" in page  # of this server


async def test_what_may_have_been_sampled_for_a_turn_left_behind_is_not_forgotten():
    """The turn never had an output, so no successor takes it up; the ledger continues with it."""
    async with serving(BREAKS, settings=ServerSettings(engine_attempts=1)) as client:
        session = await client.create(sampling={"max_tokens": 20})
        await client.chat(session, HI)
        await client.http.post(f"/sessions/{session.session_id}/end")
        successor = await client.create(resumes=session.session_id)

        assert (await client.record(successor))["turns"] == []
        assert await unknown_of(client, successor) == (1, 20)


async def test_an_engine_that_does_not_hand_over_in_time_is_unknown():
    """It samples on for all we know: nobody waits for its answer any more."""
    step = ScriptStep(text="never said", delay_s=600)
    async with serving(step, settings=ServerSettings(drain_grace_s=0.01)) as client:
        session = await client.create(sampling={"max_tokens": 20})
        agent = asyncio.create_task(client.chat(session, HI))
        await eventually(lambda: bool(client.engine.live))  # admitted is not yet asked
        client.engine.abort = deaf  # type: ignore[method-assign]
        await client.http.post("/sessions/drain")
        await agent

        assert await unknown_of(client, session) == (1, 20)


async def test_a_request_that_breaks_again_and_again_ends_the_turn_with_what_there_is():
    """As often as an engine may cut a turn short; then the agent hears of it, and the same request continues."""
    steps = [ScriptStep(text="some words", fault=ScriptedFault.DISCONNECT, fault_after=3)]
    settings = ServerSettings(engine_retry_s=0.01, max_unsolicited_aborts=0)
    async with serving(*steps, settings=settings) as client:
        session = await client.create(sampling={"max_tokens": 20})
        failed = await client.chat(session, HI)
        [partial] = (await client.record(session))["turns"]
        message = await client.say(session, HI)
        [whole] = (await client.record(session))["turns"]

    assert (failed.status_code, partial["end"], len(partial["output_ids"])) == (502, "engine_failed", 3)
    assert (message["content"], whole["output_ids"][:3], whole["end"]) == ("some words", partial["output_ids"], "model")


async def deaf(request_id: str | None) -> int:
    """An engine that ends nothing."""
    return 0
