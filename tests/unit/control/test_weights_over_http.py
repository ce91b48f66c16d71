"""An update driven from a process that has nothing but addresses: of engine servers, and of session servers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.engines.base import PauseMode
from harness.engines.pool.discovered import DiscoveredPool, FoundWorker
from harness.engines.pool.pool import EnginePool
from harness.engines.pool.workers import UNSETTLED
from harness.engines.scripted import ScriptStep
from harness.errors import EngineError, EngineUnavailable
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.weight_workers import reach
from harness.rollouts.control.weights import WeightUpdater
from harness.rollouts.control.weights_report import UpdateBudget
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from harness.server.store.sqlite import open_store
from harness.sessions.gate import Hold, HoldKind
from harness.types import GenerationRequest, SamplingParams, as_ids
from tests.builders import toy_template, user
from tests.fake_engines.fake_server import FakeServer, Fault, serving
from tests.fake_engines.providers import fake_provider, make_fake, scripted_engine
from tests.session_servers.scripted import SAY_NOTHING, canned_server
from tests.session_servers.served import PATIENCE_S, Client, eventually

CHECKPOINT = Path("/weights/b")
CONTINUES = {"sglang": "/continue_generation", "vllm": "/resume"}
QUICK = UpdateBudget(sweep_s=5, gate_s=20, pause_s=20, apply_s=20, verify_s=20, continue_s=20)


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
        fakes = [
            make_fake(kind, scripted_engine(ScriptStep(text="one"), ScriptStep(text="two"))) for _ in range(workers)
        ]
        for fake in fakes:
            await stack.enter_async_context(serving(fake, notices_disconnects=kind == "vllm"))
        providers = [fake_provider(fake) for fake in fakes]
        engine = EnginePool(providers) if workers > 1 else providers[0]
        settings = ServerSettings(pause_timeout_s=0.5) if workers == 1 else None
        running = await stack.enter_async_context(serve(engine, toy_template(), MemoryStore(), settings))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S))
        client = Client(http, engine, running.server, running.url, running.restored)
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
                EngineError, match=r"no worker serves weight version 2, some .* its weights are unknown"
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


async def test_a_server_that_serves_with_nobody_is_named_as_a_problem(cluster: Cluster):
    """All its workers went while the weights changed: the update itself went well, and no turn can be served."""
    async with cluster.updater().update(1) as update:
        await update.apply(CHECKPOINT)
        for name in list(cluster.pool.workers.providers):
            await cluster.pool.workers.retire(name, "gone")

    [problem] = update.report.problems
    assert problem == f"{cluster.client.url}: no worker serves sessions: there is no worker"


async def test_a_worker_that_cannot_be_reached_is_reported_and_the_others_are_updated(cluster: Cluster):
    """It is left out of the update, not in its way."""
    async with cluster.updater(gone=f"{cluster.kind}=http://127.0.0.1:9").update(1) as update:
        await update.apply(CHECKPOINT)

    assert [worker.error for worker in update.report.workers] == [None, None]
    assert len(update.report.problems) == 1
    assert "127.0.0.1:9" in update.report.problems[0]


async def test_an_engine_that_refuses_to_go_on_once_goes_on(cluster: Cluster):
    for fake in cluster.fakes:
        fake.faults[CONTINUES[cluster.kind]] = [Fault.REFUSED]

    async with cluster.updater().update(1) as update:
        await update.apply(CHECKPOINT)

    assert update.report.problems == ()
    assert await cluster.client.say(await cluster.client.create(), [user("a")])


async def test_an_engine_that_never_goes_on_is_named_until_it_does(cluster: Cluster):
    """The session server asks on when the update has given up; nothing else has to happen for the turns to continue."""
    stubborn = cluster.fakes[1]
    for fake in cluster.fakes:
        fake.faults[CONTINUES[cluster.kind]] = [Fault.REFUSED] * 1000
    updater = WeightUpdater(cluster.addresses, [cluster.client.url], budget=replace(QUICK, continue_s=0.2))

    async with updater.update(1) as update:
        await update.apply(CHECKPOINT)
    await eventually(lambda: bool(cluster.client.server.left_engines._error))
    left = await cluster.client.http.get("/health")
    for fake in cluster.fakes:
        fake.faults.clear()
    await eventually(lambda: cluster.client.server.left_engines.problem is None)

    assert any(stubborn.url in problem for problem in update.report.problems)
    assert (left.status_code, left.json()["status"]) == (503, "engine_paused")
    assert stubborn.url in left.json()["engine"]["left_paused"]
    assert await cluster.client.say(await cluster.client.create(), [user("a")])


async def test_an_engine_that_a_killed_update_left_paused_goes_on_within_the_ttl(cluster: Cluster):
    """The update is dropped where it stands, as by `kill -9`; a new one does not have to come."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(SessionServerClient(cluster.client.url))
        engines = await reach(cluster.addresses, stack, 30)
        for engine in engines.reached.values():
            await engine.pause(PauseMode.ABORT)
        await server.gate("killed", 0.3).pause(deadline_s=30, engines=True)  # the last time that it renews its hold

    assert await cluster.client.say(await cluster.client.create(), [user("a")])


async def test_a_provider_whose_engine_refuses_to_go_on_holds_no_request_back(cluster: Cluster):
    """What it held waits in the engine then, where it has a deadline, and continues with it."""
    [provider, _] = cluster.pool.workers.providers.values()
    await provider.pause(PauseMode.ABORT)
    cluster.fakes[0].faults[CONTINUES[cluster.kind]] = [Fault.REFUSED]
    with pytest.raises(EngineError):
        await provider.resume()

    asking = asyncio.create_task(
        provider.generate(GenerationRequest(as_ids([1, 2, 3]), SamplingParams(max_new_tokens=4), request_id="0" * 32))
    )
    await eventually(lambda: bool(cluster.fakes[0].bodies))
    await provider.resume()
    assert (await asking).output_ids.size


@pytest.mark.parametrize("transfer_that", ["labels", "forgets", "breaks off"])
async def test_a_transfer_leaves_no_weights_under_the_label_of_others(cluster: Cluster, transfer_that: str):
    """It loads past the provider; until it has said which weights they are, the server serves nobody with them."""

    async def transfer(_: object, label: str) -> None:
        for fake in cluster.fakes:
            fake.weights = "/weights/new"
            if transfer_that == "labels":
                async with httpx.AsyncClient(base_url=fake.url, timeout=30) as http:
                    await http.post("/update_weight_version", json={"new_version": label, "abort_all_requests": False})
        if transfer_that == "breaks off":
            raise ConnectionResetError

    async def update() -> None:
        async with cluster.updater().update(1) as begun:
            await begun.apply(transfer)

    def labels_of_the_new() -> list[set[str]]:
        return [labels for fake in cluster.fakes for weights, labels in fake.sampled if weights == "/weights/new"]

    if transfer_that == "labels":
        await update()
        await cluster.client.say(await cluster.client.create(), [user("a")])
        assert labels_of_the_new() == [{"1"}]
        return
    with pytest.raises(EngineError if transfer_that == "forgets" else ConnectionResetError):
        await update()
    assert [fake.engine.weight_version for fake in cluster.fakes] == ["updating-1", "updating-1"]
    assert [worker.fence for worker in cluster.pool.workers] == [UNSETTLED, UNSETTLED]
    assert labels_of_the_new() == []


async def test_engines_are_reached_at_once_and_in_time(monkeypatch: pytest.MonkeyPatch):
    """Servers that never answer cost one budget together; a guard that this process wants is not proven at them."""
    monkeypatch.setenv("HARNESS_REPEAT_TERMINATE_ENABLE", "1")
    async with canned_server(SAY_NOTHING) as silent:
        addresses = [f"sglang={silent.url}/{number}" for number in range(20)]
        async with asyncio.timeout(30), AsyncExitStack() as stack:
            engines = await reach(addresses, stack, 0.3)

    assert engines.reached == {}
    assert [error.partition(": ")[0] for error in engines.errors] == addresses


async def test_a_session_server_does_not_hang_at_an_engine_that_is_paused():
    """It says what is the matter; told to, it continues the engine."""
    fake = make_fake("sglang", scripted_engine())
    async with serving(fake, notices_disconnects=False):
        provider = fake_provider(fake, self_test_s=1.5)
        async with fake_provider(fake) as controller:
            await controller.pause(PauseMode.ABORT)
        with pytest.raises(EngineUnavailable, match=r"is it paused\?.*--continue-engines"):
            await provider.__aenter__()
        provider.continues_at_entry = True
        async with provider:
            assert (await provider.health()).ready


@pytest.mark.parametrize("is_found", [False, True], ids=["given", "found"])
async def test_a_server_that_finds_a_hold_that_ran_out_continues_its_engine_before_it_tests_it(
    tmp_path: Path, *, is_found: bool
):
    """Controller and server died together: what the store knows of the hold is all that is left of them."""
    fake = make_fake("sglang", scripted_engine())
    found = DiscoveredPool(
        lambda: [FoundWorker("it", partial(fake_provider, fake))], interval_s=0.05, start_timeout_s=60
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(fake, notices_disconnects=False))
        async with fake_provider(fake) as controller:
            await controller.pause(PauseMode.ABORT)
        async with open_store(tmp_path / "sessions.db") as store:
            await store.keep_hold(Hold("dead", HoldKind.PAUSE, until=1.0, engines=True))
        store = open_store(tmp_path / "sessions.db")
        engine = found if is_found else fake_provider(fake)
        running = await stack.enter_async_context(serve(engine, toy_template(), store))
        await eventually(lambda: running.server.left_engines.problem is None)
        assert not found.continues_at_entry


async def test_an_abort_names_engines_that_somebody_left_paused_and_continues_them_when_told_to(cluster: Cluster):
    """Engines that a hold covers are somebody's, and are left alone."""
    abort = partial(abort_rollout, [], session_servers=[cluster.client.url], engine_workers=cluster.addresses)
    async with cluster.updater().update(1):
        during = await abort(continue_engines=True)
    async with AsyncExitStack() as stack:
        for engine in (await reach(cluster.addresses, stack, 30)).reached.values():
            await engine.pause(PauseMode.ABORT)
    found = await abort()
    continued = await abort(continue_engines=True)
    after = await abort()

    assert (during.left_paused, during.problems) == ((), ())
    assert [problem.partition(": ")[2][:9] for problem in found.problems] == ["is paused"] * 2
    assert [answer.error for answer in continued.left_paused] == [None, None]
    assert (after.left_paused, after.problems) == ((), ())
