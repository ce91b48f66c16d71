"""Engines that die in the middle of a generation, or lose a part of it: their own logs against the ledger.

The fake servers note every token where it is sampled. That is the other bookkeeper: nothing here compares the harness
with itself.
"""

import asyncio
from random import Random

import httpx
import pytest

from harness.engines.base import LogprobScale
from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.server.settings import ServerSettings
from harness.types import STREAM_INTERVAL, Json
from tests.builders import user
from tests.fake_engines.fake_server import FakeServer
from tests.fake_engines.fake_server import serving as serving_fake
from tests.fake_engines.providers import FAKE_KINDS, LOREM, fake_provider, make_fake, scripted_engine
from tests.session_servers.served import PATIENCE_S, eventually, serving_with
from tests.thoroughness import examples

DEATHS = examples(20)
"""Of each kind of engine."""
SIZE = 130
BUDGET = 400
SAYS = ScriptStep(text=LOREM[: SIZE - 1], token_delay_s=1e-6)


def check(turn: Json, fake: FakeServer, deaths: int) -> None:
    """The turn has exactly what the engine sampled for it, but for the last interval of each request that died."""
    requests = {body["request_id"] if "request_id" in body else body["rid"]: body for body in fake.bodies}
    assert [each["start"] for each in turn["segments"]] == [0, *(each["end"] for each in turn["segments"][:-1])]
    assert turn["segments"][-1]["end"] == len(turn["output_ids"])
    for segment in turn["segments"]:
        start, end = segment["start"], segment["end"]
        body, sampled = requests[segment["request_id"]], fake.log[segment["request_id"]]
        asked = body.get("input_ids") or body.get("token_ids") or body["prompt"]
        assert asked == turn["prompt_ids"] + turn["output_ids"][:start], "a token was sampled twice"
        assert sampled[: end - start] == turn["output_ids"][start:end]
    assert len(turn["unknown"]) == deaths
    arrived = {segment["request_id"]: segment["end"] - segment["start"] for segment in turn["segments"]}
    for lost in turn["unknown"]:
        missing = len(fake.log[lost["request_id"]]) - arrived.get(lost["request_id"], 0)
        assert 0 <= missing <= min(lost["at_most"], STREAM_INTERVAL)


@pytest.mark.parametrize("kind", FAKE_KINDS)
async def test_deaths_in_mid_decode_cost_one_interval_each_at_most(kind: str) -> None:
    """The turn continues from what arrived; with what is unknown, the ledger is the engine's own count."""
    random, fake = Random(kind), make_fake(kind, scripted_engine(SAYS))
    settings = ServerSettings(engine_retry_s=0.001, max_unsolicited_aborts=3)
    async with (
        fake.engine,
        serving_fake(fake, notices_disconnects=kind.startswith("vllm")),
        serving_with(fake_provider(fake), settings=settings) as client,
    ):
        before, deaths = set(fake.log), 0
        ledgers = []
        while deaths < DEATHS:
            fake.dies_after = [random.randint(1, SIZE - 1) for _ in range(random.randint(1, 2))]
            expected = len(fake.dies_after)
            session = await client.create(sampling={"max_tokens": BUDGET})
            await client.say(session, [user("hi")])
            record = await client.record(session)
            [turn] = record["turns"]
            assert (turn["status"], fake.dies_after) == ("completed", [])
            check(turn, fake, expected)
            ledgers.append(record["ledger"])
            deaths += expected

    sampled = sum(len(log) for request, log in fake.log.items() if request not in before)
    generated = sum(ledger["generated"] for ledger in ledgers)
    accounted = sum(ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values()) for ledger in ledgers)
    assert generated == accounted
    assert 0 <= sampled - generated <= min(deaths * STREAM_INTERVAL, sum(each["unknown"]["tokens"] for each in ledgers))
    assert sum(each["unknown"]["requests"] for each in ledgers) == deaths


@pytest.mark.parametrize("sampled", [1, 2, 51, 75, SIZE - 1])
@pytest.mark.parametrize("kind", ["sglang", "sglang-incremental"])
async def test_a_request_that_sglang_retracts_and_aborts_loses_what_it_had_not_sent(kind: str, sampled: int) -> None:
    """SGLang answers from the queue with what it had sent: it stays, the rest is unknown, the turn continues."""
    hangs = ScriptStep(text=SAYS.text, token_delay_s=1e-6, fault=ScriptedFault.HANG, fault_after=sampled)
    fake = make_fake(kind, scripted_engine(hangs, SAYS), repeats_last_id=kind == "sglang-incremental")
    async with (
        serving_fake(fake, notices_disconnects=False),
        serving_with(fake_provider(fake, logprob_scale=LogprobScale.AFTER_TEMPERATURE)) as client,
    ):
        session = await client.create(sampling={"max_tokens": BUDGET})
        agent = asyncio.create_task(client.say(session, [user("hi")]))
        await eventually(lambda: any(len(log) == sampled for log in fake.log.values()))
        async with httpx.AsyncClient(base_url=fake.url, timeout=PATIENCE_S) as http:
            await http.post("/pause_generation", json={"mode": "retract"})
            await http.post("/abort_request", json={"abort_all": True})
            await http.post("/continue_generation", json={})
        await agent
        record = await client.record(session)

    [turn], ledger = record["turns"], record["ledger"]
    sent = 1 + (sampled - 1) // STREAM_INTERVAL * STREAM_INTERVAL
    assert (turn["status"], [each["end"] for each in turn["segments"]]) == ("completed", [sent, sent + SIZE])
    check(turn, fake, deaths=1)
    [lost] = turn["unknown"]
    assert (lost["at_most"], lost["reason"]) == (BUDGET - sent, "retracted")
    assert (ledger["generated"], ledger["trained"]) == (sent + SIZE, sent + SIZE)
