"""An update driven from a process that has nothing but addresses: of engine servers, and of session servers."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.engines.pool import EnginePool
from harness.engines.scripted import Step
from harness.engines.workers import UNSETTLED
from harness.errors import EngineError, ScenarioError
from harness.manager.weight_report import UpdateBudget
from harness.manager.weights import WeightUpdater
from harness.server.serving import serve_in_process
from harness.server.settings import ServerSettings
from harness.store.memory import MemoryStore
from tests.engines.fake_server import FakeServer, Fault, serving
from tests.engines.providers import fake_provider, make_fake, scripted_engine
from tests.fakes import toy_template, user
from tests.served import PATIENCE_S, Client, eventually

CHECKPOINT = Path("/weights/b")
QUICK = UpdateBudget(sweep_s=5, gate_s=5, pause_s=5, apply_s=5, verify_s=5, continue_s=5)


@dataclass
class Cluster:
    """Two engine servers and a session server in front of them."""

    kind: str
    fakes: list[FakeServer]
    pool: Any
    """What serves the sessions: a pool, or the provider of the only server."""
    client: Client

    @property
    def addresses(self) -> list[str]:
        """How the updater knows the engines."""
        return [f"{self.kind}={fake.url}" for fake in self.fakes]

    def break_load(self, index: int) -> None:
        """The next update of that server breaks off while it loads."""
        path = "/collective_rpc" if self.kind == "vllm" else "/update_weights_from_disk"
        self.fakes[index].faults[path] = [Fault.REFUSED]

    def updater(self, *, gone: str = "") -> WeightUpdater:
        """One that shares no object with the session server."""
        return WeightUpdater(self.addresses + ([gone] if gone else []), [self.client.url], budget=QUICK)


@pytest.fixture(name="cluster", params=["sglang", "vllm"])
async def _cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with _running(request.param) as cluster:
        yield cluster


@asynccontextmanager
async def _running(kind: str, *, workers: int = 2) -> AsyncIterator[Cluster]:
    """A pool of two engine servers, or one of them without a pool, whose turns wait half a second for its weights."""
    async with AsyncExitStack() as stack:
        fakes = [make_fake(kind, scripted_engine(Step(text="one"), Step(text="two"))) for _ in range(workers)]
        for fake in fakes:
            await stack.enter_async_context(serving(fake, notices_disconnects=kind == "vllm"))
        providers = [fake_provider(fake) for fake in fakes]
        engine = EnginePool(providers) if workers > 1 else providers[0]
        settings = ServerSettings(pause_timeout_s=0.5) if workers == 1 else None
        running = await stack.enter_async_context(serve_in_process(engine, toy_template(), MemoryStore(), settings))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S))
        client = Client(http, engine, running.server, running.url, running.restored)  # type: ignore[arg-type]
        yield Cluster(kind, fakes, engine, client)


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
    cluster.break_load(1)

    async with cluster.updater().update(1) as update:
        await update.apply(CHECKPOINT)

    assert [worker.fence for worker in cluster.pool.workers] == ["", UNSETTLED]
    assert [worker.error is None for worker in update.report.workers] == [True, False]
    session = await cluster.client.create()
    await cluster.client.say(session, [user("a")])
    assert (await cluster.client.samples(session))[0]["weight_versions"] == ["1"]


async def test_a_server_whose_only_engine_broke_off_serves_nobody_and_says_so():
    """One good update by address, one that fails while it loads: no turn under weights that nobody knows."""
    for kind in ("sglang", "vllm"):
        async with _running(kind, workers=1) as cluster:
            session = await cluster.client.create()
            async with cluster.updater().update(1) as update:
                await update.apply(CHECKPOINT)
            first = await cluster.client.say(session, [user("a")])
            cluster.break_load(0)

            with pytest.raises(
                EngineError, match=r"no worker serves weight version 2, some .* nobody knows what it has"
            ):
                async with cluster.updater().update(2) as update:
                    await update.apply(CHECKPOINT)

            health = await cluster.client.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "weights_unsettled")
            assert (await cluster.client.gate())["state"] == "open"
            assert [worker.name for worker in update.report.unsettled] == cluster.addresses
            assert any("stays paused" in problem for problem in update.report.problems)
            sampled = len(cluster.fakes[0].sampled)
            refused = await cluster.client.chat(session, [user("a"), first, user("b")])
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "weights_unsettled")
            assert len(cluster.fakes[0].sampled) == sampled

            async with cluster.updater().update(3) as update:
                await update.apply(CHECKPOINT)
            assert [worker.error for worker in update.report.workers] == [None]
            await cluster.client.say(session, [user("a"), first, user("b")])
            [sample] = await cluster.client.samples(session)
            assert sample["weight_versions"] == ["1", "3"]
            await eventually(lambda: cluster.client.server.left_engines.problem is None)
            assert (await cluster.client.http.get("/health")).json()["status"] == "ok"


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
