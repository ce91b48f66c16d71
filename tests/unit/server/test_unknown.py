"""What engines may have sampled and did not hand over stands beside the ledger's sum, wherever the ledger is shown."""

import asyncio

import pytest

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.server.settings import ServerSettings
from harness.types import GenerationRequest, GenerationResult
from tests.builders import user
from tests.fake_engines.fake_server import serving as serving_fake
from tests.fake_engines.providers import fake_provider, make_fake, scripted_engine
from tests.session_servers.served import Client, Served, says, serving, serving_with
from tests.session_servers.store_file import ledger_of, read_file

HI = [user("hi")]
BREAKS = ScriptStep(text="some words", fault=ScriptedFault.DISCONNECT, fault_after=3)
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
    """It was sampled, though the look at the label behind it, which this API needs, finds a silent server."""
    fake = make_fake("vllm-completions", scripted_engine(*says("fine")))
    sample = fake._whole

    async def sample_and_fall_silent(request: GenerationRequest) -> GenerationResult:
        result = await sample(request)
        fake.is_silent = True
        return result

    async with (
        serving_fake(fake, notices_disconnects=True),
        serving_with(fake_provider(fake), settings=ServerSettings(engine_attempts=1)) as client,
    ):
        session = await client.create(sampling={"max_tokens": 20})
        fake._whole = sample_and_fall_silent  # type: ignore[method-assign]
        failed = await client.chat(session, HI)
        fake.is_silent = False
        counted = await unknown_of(client, session)

    assert (failed.status_code, counted) == (502, (1, 20))


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
    """The turn never had an output, so no successor takes it up; the ledger goes on with it."""
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
        await client.turns_in_flight(1)
        client.engine.abort = deaf  # type: ignore[method-assign]
        await client.http.post("/sessions/drain")
        await agent

        assert await unknown_of(client, session) == (1, 20)


async def deaf(request_id: str | None) -> int:
    """An engine that ends nothing."""
    return 0
