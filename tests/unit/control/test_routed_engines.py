"""A controller that is given a router for its engines: it learns the workers there, and tells each of them itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from harness.errors import EngineUnavailable, ScenarioError
from harness.gateway.router.routed import RouterSettings, open_routed
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.abort_report import AbortBudget, AbortStep, AgentHooks
from harness.rollouts.control.engines import EngineServer, learn_workers
from harness.rollouts.control.pause import paused_rollout
from harness.rollouts.control.weights import WeightUpdater
from harness.rollouts.control.weights_report import UpdateBudget
from harness.rollouts.manager import SessionManager
from harness.server.serving import RunningServer, serve
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from harness.types import Json
from tests.builders import toy_template, user
from tests.fake_engines.fake_server import FakeServer
from tests.fake_engines.providers import toy_tokenizer
from tests.fake_engines.workers import LONG, PATIENCE_S, FakeGateway, fake_workers, hurry, serving_app
from tests.session_servers.scripted import SAY_NOTHING, canned_server, http_answer
from tests.session_servers.served import eventually

TOKEN = "t0ken"
KINDS = ["sglang", "vllm"]
CHECKPOINT = Path("/weights/b")
PATIENT = AbortBudget(drain_s=20, engines_s=20, resume_s=20)
UPDATE = UpdateBudget(sweep_s=20, gate_s=20, pause_s=20, apply_s=20, verify_s=20, continue_s=20)


@dataclass
class Cluster:
    """A router with an admin token, which serves sessions by its workers."""

    workers: list[FakeServer]
    running: RunningServer
    http: httpx.AsyncClient

    @property
    def address(self) -> SessionServerAddress:
        """As a controller knows the server of its sessions."""
        return SessionServerAddress(self.running.url, TOKEN)

    @property
    def engines(self) -> list[str]:
        """As a controller knows the engines."""
        return [f"router={self.running.url}"]

    async def start_turn(self) -> asyncio.Task[httpx.Response]:
        """A turn of which some tokens have been sampled."""
        session = (await self.http.post("/sessions", json={})).json()
        body = {"model": "m", "messages": [user("Hi.")]}
        key = {"authorization": f"Bearer {session['api_key']}"}
        asking = asyncio.create_task(self.http.post("/v1/chat/completions", json=body, headers=key))
        await eventually(lambda: any(live.sampled for worker in self.workers for live in worker.engine.live))
        return asking

    @property
    def gate(self) -> str:
        return str(self.running.server.gatekeeper.gate.state)

    @property
    def epoch(self) -> int:
        """How often the gate has changed."""
        return self.running.server.gatekeeper.gate.epoch


@asynccontextmanager
async def clustered(*kinds: str, key: str = "") -> AsyncIterator[Cluster]:
    """A router in front of fake workers that serve version 0, and want `key`."""
    gateway = FakeGateway()
    async with fake_workers(*kinds, step=LONG) as workers, serving_app(gateway) as upstream:
        for worker in workers:
            worker.engine.relabel("0")
            worker.api_key = key
        gateway.listed = [worker.url for worker in workers]
        settings = RouterSettings(router_url=upstream, engine_key=key, interval_s=0.05)
        guarded = ServerSettings(admin_token=TOKEN)
        async with (
            open_routed(settings, None, vocab_size=toy_tokenizer().vocab_size, admin_token=TOKEN) as routed,
            serve(routed.pool, toy_template(), MemoryStore(), guarded, around=routed.around) as running,
            httpx.AsyncClient(
                base_url=running.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE_S
            ) as http,
        ):
            yield Cluster(workers, running, http)


async def test_an_update_reaches_every_worker_of_the_router():
    """And the turn under way continues as one, under the new weights."""
    async with clustered(*KINDS) as cluster:
        asking = await cluster.start_turn()
        async with WeightUpdater(cluster.engines, [cluster.address], budget=UPDATE).update(1) as update:
            await update.apply(CHECKPOINT)
        hurry(cluster.workers)
        answer = await asking

        assert update.report.problems == ()
        assert sorted(worker.name for worker in update.report.workers) == sorted(w.url for w in cluster.workers)
        assert {worker.engine.weight_version for worker in cluster.workers} == {"1"}
    assert answer.status_code == 200


async def test_a_manager_on_a_router_pauses_and_aborts_by_its_address():
    """The router is both: the server of the sessions, whose token opens it, and the engines."""
    async with (
        clustered(*KINDS) as cluster,
        SessionManager(cluster.running.url, admin_token=TOKEN, engines=cluster.engines) as manager,
    ):
        asking = await cluster.start_turn()
        async with manager.paused(PATIENT) as paused:
            assert (cluster.gate, paused.problems, asking.done()) == ("paused", (), False)
            assert not any(worker.engine.live for worker in cluster.workers)
        hurry(cluster.workers)
        assert (await asking).status_code == 200
        hurry(cluster.workers, hurries=False)
        asking = await cluster.start_turn()
        aborted = await manager.abort([], budget=PATIENT)

        assert (await asking).status_code == 404
        assert (cluster.gate, aborted.problems) == ("open", ())
    assert {answer.name for answer in aborted.engines} == {worker.url for worker in cluster.workers}


async def test_a_router_that_stands_elsewhere_opens_with_the_token_that_its_address_names(monkeypatch):
    """Its workers, which want a key, get that of the environment."""
    monkeypatch.setenv("ROUTER_TOKEN", TOKEN)
    monkeypatch.setenv("HARNESS_ENGINE_KEY", "k3y")
    async with clustered(*KINDS, key="k3y") as cluster:
        engines = [f"{cluster.engines[0]}#key=ROUTER_TOKEN", "http://somebody.else:30000"]
        learned = await learn_workers(engines, [], 20)
        async with paused_rollout([cluster.address], engines[:1], PATIENT) as report:
            pass

    named = [EngineServer(worker.url, kind) for worker, kind in zip(cluster.workers, KINDS, strict=True)]
    assert learned == [*named, "http://somebody.else:30000"]
    assert report.problems == ()


async def control(verb: str, cluster: Cluster) -> None:
    """An abort, a pause or an update."""
    match verb:
        case "abort":
            await abort_rollout([], session_servers=[cluster.address], engine_workers=cluster.engines, budget=PATIENT)
        case "pause":
            async with paused_rollout([cluster.address], cluster.engines, PATIENT):
                pass
        case _:
            async with WeightUpdater(cluster.engines, [cluster.address], budget=UPDATE).update(1):
                pass


@pytest.mark.parametrize("verb", ["abort", "pause", "update"])
async def test_a_router_whose_workers_cannot_be_reached_from_here_is_one_error(verb: str):
    """Before anything has changed: the router has their key, and this process has not."""
    async with clustered("sglang", "sglang", key="k3y") as cluster:
        posted = [list(worker.posted) for worker in cluster.workers]
        with pytest.raises(EngineUnavailable, match=r"cannot be reached from here: .*401.*HARNESS_ENGINE_KEY"):
            await control(verb, cluster)

        assert (cluster.gate, cluster.epoch) == ("open", 0)
        assert [list(worker.posted) for worker in cluster.workers] == posted


@pytest.mark.parametrize("answer", [(404, {"error": {"message": "no such route"}}), (200, {"workers": "many"})])
async def test_a_server_that_is_no_router_is_said_to_be_none(answer: tuple[int, Json]):
    """A session server on its own, a gateway on its own."""
    async with canned_server(http_answer(*answer)) as server:
        with pytest.raises(ScenarioError, match="expected a harness router"):
            await learn_workers([f"router={server.url}"], [], 20)


async def test_a_router_wants_its_token():
    async with clustered("sglang") as cluster:
        with pytest.raises(ScenarioError, match=r"expected its admin token: .*#key=VARIABLE"):
            await learn_workers(cluster.engines, [], 20)
        with pytest.raises(ScenarioError, match="NOT_SET, which is not set"):
            await learn_workers([f"{cluster.engines[0]}#key=NOT_SET"], [], 20)


def _worker(name: str, fence: str = "") -> Json:
    return {"name": name, "weight_version": "1", "fence": fence, "in_flight": 0, "sessions": 0}


async def test_workers_at_addresses_that_lead_nowhere_from_here_are_asked_until_time_is_over():
    """They may have died just now, and the router may find that out; this one continues being served by them."""
    nowhere = "http://127.0.0.1:9"
    said = {"workers": [{"url": nowhere, "engine": "sglang"}], "sessions": {"workers": [_worker(nowhere)]}}
    async with canned_server(http_answer(200, said)) as router:
        with pytest.raises(EngineUnavailable, match=f"cannot be reached from here: .*{nowhere}"):
            await learn_workers([f"router={router.url}"], [], 1)


async def test_workers_that_the_router_has_lost_too_are_no_mistake():
    """They have died, one just now, and nobody is told to look for another address; the report names them."""
    dead, unknown = "http://127.0.0.1:9", "http://127.0.0.1:10"
    listed = [{"url": dead, "engine": "sglang"}, {"url": unknown, "engine": None}]
    pools = [[_worker(dead, fence)] for fence in ("", "it does not answer")]
    said = [http_answer(200, {"workers": listed, "sessions": {"workers": pool}}) for pool in pools]
    async with canned_server(*said) as router:
        learned = await learn_workers([f"router={router.url}"], [], 20)

    assert learned[0] == EngineServer(dead, "sglang")
    assert learned[1].name == unknown
    with pytest.raises(EngineUnavailable, match="has never answered"):
        await learned[1].abort_all(deadline_s=1)
    async with canned_server(said[1]) as router:
        report = await abort_rollout([], session_servers=[], engine_workers=[f"router={router.url}"], budget=PATIENT)
    assert {problem.split(": ")[0] for problem in report.problems} == {f"engine {dead}", f"engine {unknown}"}


async def test_a_router_that_is_gone_stops_no_abort():
    """The agents have to end all the same; an update has nothing to begin with."""
    pending = asyncio.create_task(asyncio.Event().wait())
    budget = replace(PATIENT, drain_s=0.5, engines_s=0.5, agents_s=0.1, kill_s=0.1, collect_s=0.1, resume_s=0.5)
    gone = "router=http://127.0.0.1:9"
    report = await abort_rollout(
        [pending], session_servers=["http://127.0.0.1:9"], engine_workers=[gone], budget=budget
    )
    with pytest.raises(EngineUnavailable, match=gone):
        async with WeightUpdater([gone], [], budget=replace(UPDATE, connect_s=0.5)).update(1):
            pytest.fail("the block ran")

    assert pending.cancelled()
    assert any(problem.startswith(f"engine {gone}") for problem in report.problems)


async def test_asking_a_router_for_its_workers_counts_in_the_total_of_an_abort():
    """A silent one uses most of it up: the steps that follow have what is left, and the report says where it went."""
    given = []

    async def stop(seconds: float) -> list[str]:
        given.append(seconds)
        return []

    budget = replace(PATIENT, cancel_s=0.1, resume_s=0.1, total_s=0.6)
    async with canned_server(SAY_NOTHING) as router:
        report = await abort_rollout(
            [],
            session_servers=[],
            engine_workers=[f"router={router.url}"],
            agent_hooks=[AgentHooks("mine", stop=stop)],
            budget=budget,
        )

    assert tuple(report.seconds) == tuple(AbortStep)
    assert report.seconds[AbortStep.ENGINES] > budget.working_s / 4
    assert given[0] <= max(0.0, budget.working_s - report.seconds[AbortStep.ENGINES])


async def test_an_update_waits_for_a_trainer_that_has_paused_by_verbs():
    """It is told who has the engines when it has waited for long enough, and nothing is touched; nor the other way."""
    async with clustered("sglang") as cluster:
        [worker] = cluster.workers
        updater = WeightUpdater(cluster.engines, [cluster.address], budget=replace(UPDATE, turn_s=0.1))
        (await cluster.http.post("/pause_generation", json={})).raise_for_status()
        with pytest.raises(EngineUnavailable, match="the engines are paused by the hold of 'trainer-"):
            async with updater.update(1):
                pytest.fail("the block ran")
        assert "/update_weights_from_disk" not in worker.posted
        assert cluster.gate == "paused"
        (await cluster.http.post("/continue_generation", json={})).raise_for_status()

        async with updater.update(1) as update:
            verbs = ("/pause_generation", "/update_weight_version", "/continue_generation")
            answers = [await cluster.http.post(verb, json={"new_version": "7"}) for verb in verbs]
            await update.apply(CHECKPOINT)
        assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [
            (409, "engines_held")
        ] * 3
        assert (cluster.gate, worker.engine.weight_version, update.report.problems) == ("open", "1", ())


async def test_an_abort_finds_a_trainer_that_has_paused_by_verbs():
    """Sessions end; the engines stay paused, because the hold of the trainer covers them."""
    async with clustered("sglang") as cluster:
        asking = await cluster.start_turn()
        (await cluster.http.post("/pause_generation", json={})).raise_for_status()
        report = await abort_rollout(
            [], session_servers=[cluster.address], engine_workers=cluster.engines, budget=PATIENT
        )
        assert (await asking).status_code == 404
        assert (report.problems, cluster.gate) == ((), "paused")
        (await cluster.http.post("/continue_generation", json={})).raise_for_status()
        assert cluster.gate == "open"
