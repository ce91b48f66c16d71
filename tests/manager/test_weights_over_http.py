"""An update driven from a process that has nothing but addresses: of engine servers, and of session servers."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from harness.engines.pool import EnginePool
from harness.engines.scripted import Step
from harness.engines.workers import MISSED_UPDATE
from harness.errors import ScenarioError
from harness.manager.weight_report import UpdateBudget
from harness.manager.weights import WeightUpdater
from harness.server.serving import serve_in_process
from harness.store.memory import MemoryStore
from tests.engines.fake_server import FakeServer, serving
from tests.engines.providers import fake_provider, make_fake, scripted_engine
from tests.fakes import toy_template, user
from tests.served import PATIENCE_S, Client

CHECKPOINT = Path("/weights/b")
QUICK = UpdateBudget(sweep_s=5, gate_s=5, pause_s=5, apply_s=5, verify_s=5, continue_s=5)


@dataclass
class Cluster:
    """Two engine servers and a session server in front of them."""

    kind: str
    fakes: list[FakeServer]
    pool: EnginePool
    client: Client

    @property
    def addresses(self) -> list[str]:
        """How the updater knows the engines."""
        return [f"{self.kind}={fake.url}" for fake in self.fakes]

    def updater(self, *, gone: str = "") -> WeightUpdater:
        """One that shares no object with the session server."""
        return WeightUpdater(self.addresses + ([gone] if gone else []), [self.client.url], budget=QUICK)


@pytest.fixture(name="cluster", params=["sglang", "vllm"])
async def _cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with _running(request.param) as cluster:
        yield cluster


@asynccontextmanager
async def _running(kind: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        fakes = [make_fake(kind, scripted_engine(Step(text="one"), Step(text="two"))) for _ in range(2)]
        for fake in fakes:
            await stack.enter_async_context(serving(fake, notices_disconnects=kind == "vllm"))
        pool = EnginePool([fake_provider(fake) for fake in fakes])
        running = await stack.enter_async_context(serve_in_process(pool, toy_template(), MemoryStore()))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S))
        client = Client(http, pool, running.server, running.url, running.restored)  # type: ignore[arg-type]
        yield Cluster(kind, fakes, pool, client)


async def test_the_session_server_sees_an_update_that_went_past_it(cluster: Cluster):
    """Its providers believe the old version until they are asked to look; the next turn scores what waits."""
    session = await cluster.client.create()
    first = await cluster.client.say(session, [user("a")])

    async with cluster.updater().update(1) as update:
        await update.apply(CHECKPOINT)
    await cluster.client.say(session, [user("a"), first, user("b")])

    [sample] = await cluster.client.samples(session)
    assert update.report.problems == ()
    assert [worker.weight_version for worker in cluster.pool.workers] == ["1", "1"]
    assert [worker.name for worker in update.report.workers] == cluster.addresses
    assert set(sample["behavior_versions"]) == {0, -1, 1}
    assert {p for p, b in zip(sample["proximal_versions"], sample["behavior_versions"], strict=True) if b == 0} == {1}


async def test_the_session_server_fences_a_worker_that_could_not_load(cluster: Cluster):
    """The updater holds no pool: it tells the session server what to expect."""
    cluster.fakes[1].engine.update_weights = _refuses  # type: ignore[method-assign]

    async with cluster.updater().update(1) as update:
        await update.apply(CHECKPOINT)

    assert [worker.fence for worker in cluster.pool.workers] == ["", MISSED_UPDATE]
    assert [worker.error is None for worker in update.report.workers] == [True, False]
    session = await cluster.client.create()
    await cluster.client.say(session, [user("a")])
    assert (await cluster.client.samples(session))[0]["weight_versions"] == ["1"]


async def test_a_worker_that_cannot_be_reached_is_reported_and_the_others_are_updated(cluster: Cluster):
    """It is left out of the update, not in its way."""
    async with cluster.updater(gone=f"{cluster.kind}=http://127.0.0.1:9").update(1) as update:
        await update.apply(CHECKPOINT)

    assert [worker.error for worker in update.report.workers] == [None, None]
    assert len(update.report.problems) == 1
    assert "127.0.0.1:9" in update.report.problems[0]


async def test_an_address_of_no_known_kind_is_refused():
    """A router passes no control on; an address without a kind could be one."""
    with pytest.raises(ScenarioError, match="expected sglang=URL or vllm=URL"):
        async with WeightUpdater(["http://127.0.0.1:9"], []).update(1):
            pass


async def _refuses(path: Path, version: str) -> None:
    raise web.HTTPServiceUnavailable
