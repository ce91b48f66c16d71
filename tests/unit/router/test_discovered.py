"""A pool that follows a list of workers: whoever is listed is entered, whoever is dropped or dead is left."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from harness.engines.base import LogprobScale, PauseMode
from harness.engines.connect import serving_identity
from harness.engines.pool.discovered import DiscoveredPool, FoundWorker
from harness.errors import EngineUnavailable
from harness.server.serving import serve
from harness.server.store.base import MemoryStore
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import GenerationRequest, GenerationResult, SamplingParams, as_ids
from tests.builders import toy_template
from tests.fake_engines.fake_server import FakeServer
from tests.fake_engines.providers import fake_provider
from tests.fake_engines.workers import PATIENCE_S, fake_workers, worker_processes
from tests.free_ports import free_ports
from tests.session_servers.served import eventually
from tests.toy_model import write_toy_model

INTERVAL_S = 0.05


@dataclass
class Listed:
    """A list of workers that a test changes, and a pool that follows it."""

    found: list[FoundWorker] = field(default_factory=list)
    start_timeout_s: float = PATIENCE_S
    pool: DiscoveredPool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = DiscoveredPool(lambda: self.found, interval_s=INTERVAL_S, start_timeout_s=self.start_timeout_s)

    def add(self, fake: FakeServer, scale: LogprobScale = LogprobScale.AFTER_TEMPERATURE) -> None:
        self.found.append(FoundWorker(fake.url, lambda: fake_provider(fake, logprob_scale=scale)))

    def drop(self, fake: FakeServer) -> None:
        self.found = [worker for worker in self.found if worker.name != fake.url]

    def standing(self) -> dict[str, str]:
        """Why each worker serves nobody; empty for those that serve."""
        return {status.name: status.fence for status in self.pool.workers}

    async def stand(self, expected: dict[str, str]) -> None:
        """Return once the workers stand like that."""
        await eventually(lambda: self.standing() == expected)

    async def ask(self, session_id: str) -> GenerationResult:
        params = SamplingParams(max_new_tokens=3)
        return await self.pool.generate(
            GenerationRequest(as_ids([40, 41]), params, request_id=uuid4().hex, session_id=session_id)
        )


@asynccontextmanager
async def following(*kinds: str) -> AsyncIterator[tuple[Listed, list[FakeServer]]]:
    """A pool that has found the first of some workers."""
    async with fake_workers(*kinds) as fakes:
        listed = Listed()
        listed.add(fakes[0])
        async with listed.pool:
            yield listed, fakes


async def test_a_listed_worker_is_entered_and_a_dropped_one_left():
    async with following("sglang", "vllm") as (listed, fakes):
        await listed.ask("a")
        listed.add(fakes[1])
        await listed.stand({fake.url: "" for fake in fakes})
        listed.drop(fakes[0])
        await listed.stand({fakes[1].url: ""})

        assert (await listed.ask("a")).output_ids.size == 3


async def test_a_worker_that_serves_something_else_never_joins():
    """It is asked again now and then, and the others serve."""
    async with following("sglang", "sglang") as (listed, fakes):
        listed.add(fakes[1], LogprobScale.RAW)
        await eventually(lambda: fakes[1].paths.count("/server_info") >= 2)

        assert listed.standing() == {fakes[0].url: ""}


async def test_no_worker_in_time_says_what_was_tried():
    async with fake_workers("sglang") as [fake]:
        fake.url = "http://127.0.0.1:1"
        for seconds in (0.3, 3, 30):  # a busy machine tries nothing in less
            listed = Listed(start_timeout_s=seconds)
            listed.found = [FoundWorker("gone", lambda: fake_provider(fake))]
            with pytest.raises(EngineUnavailable, match=f"no worker was ready within {seconds} s") as caught:
                async with listed.pool:
                    pass
            if "none is listed" not in caught.value.message:
                break

    assert re.search(r"\(gone: .*127.0.0.1:1", caught.value.message)


async def test_a_paused_worker_is_not_taken_for_dead():
    """Probes ask for no token: far more of them than a dead worker gets leave it where it is."""
    async with following("sglang") as (listed, fakes):
        await listed.pool.pause(PauseMode.ABORT)
        before = fakes[0].paths.count("/v1/loads")
        await eventually(lambda: fakes[0].paths.count("/v1/loads") >= before + 20)
        await listed.pool.resume()

        assert listed.standing() == {fakes[0].url: ""}
        assert "/health" not in fakes[0].paths


async def test_workers_that_are_silent_while_new_work_is_held_are_kept():
    """Loading weights silences a vLLM server for minutes: far more probes than a dead worker gets leave it in."""
    async with following("vllm") as (listed, fakes):
        is_held = True
        listed.pool.workers.excuse_silence(lambda: is_held)
        fakes[0].is_silent = True
        await listed.stand({fakes[0].url: "it does not answer"})
        before = len(fakes[0].paths)
        await eventually(lambda: len(fakes[0].paths) >= before + 60)
        assert listed.standing() == {fakes[0].url: "it does not answer"}

        is_held = False
        asking = asyncio.create_task(listed.ask("a"))
        fakes[0].is_silent = False

        assert (await asking).output_ids.size == 3


@pytest.mark.parametrize("verbs", [["pause"], ["pause", "drain"]], ids="+".join)
async def test_a_server_keeps_its_silent_workers_while_somebody_pauses(verbs: list[str]):
    """Under a drain too, which outranks the pause; before anybody does, a silent worker is left."""
    async with fake_workers("vllm", "vllm") as fakes, AsyncExitStack() as stack:
        listed = Listed()
        for fake in fakes:
            listed.add(fake)
        running = await stack.enter_async_context(serve(listed.pool, toy_template(), MemoryStore()))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S))
        await eventually(lambda: len(listed.standing()) == 2)
        for verb in verbs:
            (await http.post(f"/sessions/{verb}", json={"holder": verb, "engines": verb == "pause"})).raise_for_status()
        fakes[0].is_silent = True
        asked = len(fakes[0].paths)
        await eventually(lambda: len(fakes[0].paths) > asked + 60)
        kept = {*listed.standing()}
        for verb in verbs:
            (await http.post("/sessions/resume", json={"holder": verb, "engines_continued": True})).raise_for_status()
        await eventually(lambda: {*listed.standing()} == {fakes[1].url})

    assert kept == {fake.url for fake in fakes}


async def test_a_pool_that_has_become_empty_knows_what_it_served_and_lets_requests_wait():
    """A list that is empty for a moment, or the only worker starting anew: nothing is refused for good."""
    async with following("sglang") as (listed, fakes):
        fakes[0].engine.relabel("7")
        await listed.pool.probe()
        listed.drop(fakes[0])
        await listed.stand({})
        assert listed.pool.weight_version == "7"
        assert listed.pool.capabilities.engine == "router"
        asking = asyncio.create_task(listed.ask("a"))
        await asyncio.sleep(0)

        listed.add(fakes[0])

        assert (await asking).version_spans[0].version == "7"


async def test_a_pool_of_two_kinds_stays_what_it_is_when_the_first_worker_leaves(tmp_path: Path):
    """A run on the router of others would be told that it serves something else now."""
    chat_tokenizer = open_chat_tokenizer(write_toy_model(tmp_path))
    async with following("sglang", "vllm") as (listed, fakes):
        listed.add(fakes[1])
        await listed.stand({fake.url: "" for fake in fakes})
        before = serving_identity(listed.pool.capabilities, chat_tokenizer)
        listed.drop(fakes[0])
        await listed.stand({fakes[1].url: ""})

        assert serving_identity(listed.pool.capabilities, chat_tokenizer) == before


async def test_a_dead_worker_is_fenced_then_left_and_entered_anew_when_it_is_back():
    """Under the same address: what its predecessor had in its cache is gone."""
    async with following("sglang") as (listed, fakes), worker_processes() as processes:
        worker = await processes.start(port=free_ports())
        dead = fakes[0]
        mortal = Listed()
        mortal.found = [*listed.found, _found(worker.url, dead)]
        async with mortal.pool:
            await mortal.stand({dead.url: "", worker.url: ""})
            await worker.kill()
            await mortal.stand({dead.url: "", worker.url: "it does not answer"})
            assert (await mortal.ask("a")).output_ids.size == 3
            await mortal.stand({dead.url: ""})
            await processes.start(port=worker.port)
            await mortal.stand({dead.url: "", worker.url: ""})


def _found(url: str, like: FakeServer) -> FoundWorker:
    def opened():
        provider = fake_provider(like, logprob_scale=LogprobScale.AFTER_TEMPERATURE)
        return type(provider)(url, vocab_size=provider._vocab_size, logprob_scale=LogprobScale.AFTER_TEMPERATURE)

    return FoundWorker(url, opened)
