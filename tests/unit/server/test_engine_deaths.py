"""Engines that die in the middle of a generation: their own logs against the ledger.

The fake servers note every token where it is sampled. That is the other bookkeeper: nothing here compares the harness
with itself.
"""

from random import Random

import httpx
import pytest

from harness.engines.scripted import ScriptStep
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.store.memory import MemoryStore
from harness.types import Json
from tests.builders import toy_template, user
from tests.fake_engines.fake_server import FakeServer
from tests.fake_engines.fake_server import serving as serving_fake
from tests.fake_engines.providers import FAKE_KINDS, LOREM, fake_provider, make_fake, scripted_engine
from tests.session_servers.served import PATIENCE_S, Client

DEATHS = 50
"""Of each kind of engine: two hundred in all."""
SIZE = 130
BUDGET = 400
SAYS = ScriptStep(text=LOREM[: SIZE - 1], token_delay_s=1e-6)


def check(turn: Json, fake: FakeServer, deaths: int) -> None:
    """The turn has what the engine sampled for it, but for requests that died, and those within their bounds."""
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
        assert 0 <= missing <= lost["at_most"]


@pytest.mark.parametrize("kind", FAKE_KINDS)
async def test_fifty_deaths_in_mid_decode_are_in_the_ledger(kind: str) -> None:
    """It balances, no token is sampled twice, and the engine's own count is within what is unknown."""
    random, fake = Random(kind), make_fake(kind, scripted_engine(SAYS))
    settings = ServerSettings(engine_retry_s=0.001, max_unsolicited_aborts=3)
    async with (
        fake.engine,
        serving_fake(fake, notices_disconnects=kind.startswith("vllm")),
        serve(fake_provider(fake), toy_template(), MemoryStore(), settings) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as http,
    ):
        client = Client(http, fake.engine, running.server, running.url, running.restored)
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
    assert 0 <= sampled - generated <= sum(each["unknown"]["tokens"] for each in ledgers)
    assert sum(each["unknown"]["requests"] for each in ledgers) == deaths
