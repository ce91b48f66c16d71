"""The network between a provider and its engine server, hurt for real: what the provider makes of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from harness.engines.base import TokenProvider
from harness.engines.connect import open_engine
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.errors import EngineConnectionLost, EngineError, EngineReplyInvalid, EngineUnavailable
from harness.suite.faults.engine_seam import NetworkFault
from harness.suite.faults.network import FaultyNetwork, open_network
from harness.suite.scenarios.fault import Action
from harness.types import GenerationDelta, GenerationRequest, GenerationResult, SamplingParams, as_ids
from tests.fake_engines.fake_server import serving
from tests.fake_engines.fake_sglang import FakeSGLang
from tests.fake_engines.fake_vllm import FakeVLLM
from tests.fake_engines.providers import toy_tokenizer

SERVERS = {"sglang": FakeSGLang, "vllm": FakeVLLM}
REQUEST = "0123456789abcdef" * 2
WORDS = ScriptStep(text="Enough words for a moment in the middle of them.", token_delay_s=0.005)
PARAMS = SamplingParams(max_new_tokens=64, temperature=1.0)


@asynccontextmanager
async def hurt(kind: str) -> AsyncIterator[tuple[TokenProvider, FaultyNetwork]]:
    """A provider, the network behind it, and a server at the end of it."""
    fake = SERVERS[kind](ScriptedEngine(toy_tokenizer(), Script((WORDS,))))
    async with (
        serving(fake, notices_disconnects=kind == "vllm") as url,
        open_network([url]) as ([reached], network),
        open_engine(f"{kind}={reached}", tokenizer=toy_tokenizer()) as provider,
    ):
        yield provider, network


async def generated(provider: TokenProvider, request_id: str = REQUEST) -> GenerationResult:
    """One request's whole answer."""
    async with asyncio.timeout(60):
        return await provider.generate(GenerationRequest(as_ids([5, 6, 7]), PARAMS, request_id=request_id))


BROKEN: list[tuple[Action, type[EngineError]]] = [
    ("engine_500", EngineError),
    ("engine_hang", EngineConnectionLost),
    ("cut_connection", EngineConnectionLost),
    ("malformed_reply", EngineReplyInvalid),
]


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize(("action", "error"), BROKEN)
async def test_a_provider_says_what_broke(kind: str, action: Action, error: type[EngineError]):
    """Exactly the request that was named, and only once; every other one is served."""
    async with hurt(kind) as (provider, network):
        network.arm(REQUEST, NetworkFault(action, 0.1 if action == "engine_hang" else None))

        other = await generated(provider, request_id="f" * 32)
        with pytest.raises(EngineError) as caught:
            await generated(provider)
        again = await generated(provider, request_id="e" * 32)

    assert type(caught.value) is error
    assert other.output_ids.tolist() == again.output_ids.tolist()


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_slow_network_is_only_slow(kind: str):
    async with hurt(kind) as (provider, network):
        network.arm(REQUEST, NetworkFault("slow_network", 0.3))
        began = asyncio.get_running_loop().time()
        result = await generated(provider)
        took_s = asyncio.get_running_loop().time() - began

    assert result.output_ids.size
    assert took_s >= 0.3


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize(
    ("action", "error"), [("cut_connection", EngineConnectionLost), ("malformed_reply", EngineReplyInvalid)]
)
async def test_a_stream_breaks_in_its_middle(kind: str, action: Action, error: type[EngineError]):
    """What came before the fault has come, and what comes after it is an error and no end."""
    received: list[int] = []

    async def read(provider: TokenProvider, network: FaultyNetwork) -> None:
        async for piece in provider.stream(GenerationRequest(as_ids([5, 6, 7]), PARAMS, request_id=REQUEST)):
            assert isinstance(piece, GenerationDelta)
            received.extend(piece.output_ids.tolist())
            if len(received) >= 5:
                network.arm(REQUEST, NetworkFault(action))

    async with hurt(kind) as (provider, network), asyncio.timeout(60):
        with pytest.raises(error):
            await read(provider, network)

    assert 5 <= len(received) < 40


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_dead_network_comes_back(kind: str):
    """What was under way is lost, nothing is reached, and then everything is as before."""
    async with hurt(kind) as (provider, network):
        lost = asyncio.create_task(generated(provider))
        async with asyncio.timeout(60):
            while not (await provider.health()).running:
                await asyncio.sleep(0.001)
        await network.kill()
        with pytest.raises(EngineConnectionLost):
            await lost
        with pytest.raises(EngineUnavailable):
            await generated(provider, request_id="e" * 32)
        await network.revive()

        assert (await generated(provider, request_id="d" * 32)).output_ids.size


async def test_what_the_provider_did_not_ask_for_compressed_does_not_come_so():
    """SGLang's counters came as gzip, were read as text, and the run could not hold its ledger against them."""

    async def count(request: web.Request) -> web.Response:
        answer = web.Response(text="sglang:generation_tokens_total 7\n" * 100)
        answer.enable_compression()  # where the one who asks takes it
        return answer

    app = web.Application()
    app.router.add_get("/metrics", count)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with (
            open_network([f"http://127.0.0.1:{runner.addresses[0][1]}"]) as ([reached], _),
            aiohttp.ClientSession(skip_auto_headers=("accept-encoding",), auto_decompress=False) as http,
            http.get(f"{reached}/metrics") as answer,
        ):
            text = await answer.read()
    finally:
        await runner.cleanup()

    assert text.startswith(b"sglang:generation_tokens_total 7")
