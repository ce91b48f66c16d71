"""A trainer that speaks only SGLang's verbs, to the router, under running sessions: no turn is lost to it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from harness.engines.scripted import ScriptStep, scripted_logprobs
from harness.gateway.router.routed import RouterSettings, open_routed
from harness.gateway.router.trainer_verbs import HOLD_TTL_S, TrainerVerbs
from harness.samples.proximal import NextVersions, count_next_versions
from harness.server.app import SessionServer
from harness.server.serving import serve
from harness.server.store.connect import open_store
from harness.sessions.gate import GateState
from harness.sessions.weights.weight_update import SweepReport, SweepRequest
from harness.types import Json, as_ids
from server_patch.router.verbs import VerbOrder, VerbResult
from tests.builders import toy_template, user
from tests.fake_engines.fake_server import FakeServer
from tests.fake_engines.providers import toy_tokenizer
from tests.fake_engines.workers import LONG, PATIENCE_S, FakeGateway, fake_workers, hurry, serving_app
from tests.session_servers.served import eventually

BRIEF = ScriptStep(text="Understood.")
KINDS = ["sglang", "vllm"]


@dataclass
class Clock:
    """The time of day, which passes when told."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Router:
    """A router with its sessions in this process, and its workers."""

    http: httpx.AsyncClient
    server: SessionServer
    workers: list[FakeServer]
    clock: Clock

    async def verb(self, path: str, status: int = 200, **fields: object) -> Json:
        """A verb of the trainer, answered so."""
        answer = await self.http.post(path, json=fields)
        assert answer.status_code == status, answer.text
        body: Json = answer.json()
        return body

    async def create(self) -> str:
        """A new session."""
        created = await self.http.post("/sessions", json={})
        assert created.status_code == 200, created.text
        session_id: str = created.json()["session_id"]
        return session_id

    async def turn(self, session_id: str, *texts: str) -> httpx.Response:
        """A model call; `texts` are what user and model said so far."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)] or [user("Hi.")]
        body = {"model": "m", "messages": messages}
        return await self.http.post(f"/sessions/{session_id}/v1/chat/completions", json=body)

    async def turns(self, session_id: str) -> list[Json]:
        """The recorded ones."""
        turns: list[Json] = (await self.http.get(f"/sessions/{session_id}?ids=prompts")).json()["turns"]
        return turns

    async def sample(self, session_id: str) -> Json:
        """The one sample of a session."""
        [sample] = (await self.http.get(f"/sessions/{session_id}/samples")).json()["samples"]
        return dict(sample)

    async def sampling(self) -> None:
        """Return when some worker has sampled tokens of a request that is in flight."""
        await eventually(
            lambda: any(live.sampled and not live.is_aborted for worker in self.workers for live in worker.engine.live)
        )

    @property
    def gate(self) -> GateState:
        return self.server.gatekeeper.gate.state

    def pass_time(self, seconds: float) -> None:
        """The clock is set forward, and looked at."""
        self.clock.now += seconds
        self.server.gatekeeper.look_again()


@asynccontextmanager
async def routing(
    *kinds: str, step: ScriptStep = BRIEF, store: str = "memory", clock: Clock | None = None
) -> AsyncIterator[Router]:
    """A router in front of fake workers that serve version 0."""
    gateway, clock = FakeGateway(), clock or Clock()
    async with fake_workers(*kinds, step=step) as workers, serving_app(gateway) as upstream:
        for worker in workers:
            worker.engine.relabel("0")
        gateway.listed = [worker.url for worker in workers]
        async with routing_to(upstream, store, clock) as (http, server):
            yield Router(http, server, workers, clock)


@asynccontextmanager
async def routing_to(upstream: str, store: str, clock: Clock) -> AsyncIterator[tuple[httpx.AsyncClient, SessionServer]]:
    """A router in front of a gateway."""
    settings = RouterSettings(router_url=upstream, interval_s=0.05)
    async with (
        open_routed(settings, None, vocab_size=toy_tokenizer().vocab_size) as routed,
        serve(routed.pool, toy_template(), open_store(store, clock), around=routed.around, clock=clock) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as http,
    ):
        yield http, running.server


@asynccontextmanager
async def started_again(directory: Path, path: str, **fields: object) -> AsyncIterator[tuple[Router, str]]:
    """A router that was told a verb and stopped, and runs again on the same store; with a session of before."""
    store, clock, gateway = str(directory / "sessions.db"), Clock(), FakeGateway()
    async with fake_workers("sglang") as [worker], serving_app(gateway) as upstream:
        worker.engine.relabel("0")
        gateway.listed = [worker.url]
        async with routing_to(upstream, store, clock) as (http, server):
            router = Router(http, server, [worker], clock)
            session = await router.create()
            await router.verb(path, **fields)
        async with routing_to(upstream, store, clock) as (http, server):
            yield Router(http, server, [worker], clock), session


def require_true_proximal(sample: Json, *, newest: int) -> None:
    """Every sampled token that is older than `newest` has the logprob of its next version, by the engine's own rule."""
    tokens, start = as_ids(sample["tokens"]), len(sample["tokens"]) - sample["response_length"]
    columns = zip(sample["behavior_versions"], sample["proximal_versions"], sample["proximal_logprobs"], strict=True)
    for i, (behavior, proximal, logprob) in enumerate(columns):
        if 0 <= behavior < newest:
            at = start + i
            true = scripted_logprobs(tokens[at : at + 1], at, str(behavior + 1))
            assert (proximal, logprob) == (behavior + 1, pytest.approx(float(true[0])))


async def test_five_updates_inside_one_turn_leave_one_turn():
    """By pause, weights, continue: it serves every time, and each token that met its next version is scored by it."""
    async with routing(*KINDS, step=LONG) as router:
        session = await router.create()
        asking = asyncio.create_task(router.turn(session))
        for version in range(1, 6):
            await router.sampling()
            await router.verb("/pause_generation", mode="abort")
            await router.verb("/update_weights_from_disk", model_path="/weights/b", weight_version=str(version))
            await router.verb("/continue_generation")
        hurry(router.workers)
        answer = await asking
        [turn] = await router.turns(session)
        sample = await router.sample(session)

    assert answer.status_code == 200
    assert (turn["status"], len(turn["segments"])) == ("completed", 6)
    assert set(sample["behavior_versions"]) - {-1} == {0, 1, 2, 3, 4, 5}
    require_true_proximal(sample, newest=5)


@pytest.mark.parametrize(("kind", "mode"), [("sglang", "retract"), ("sglang", "in_place"), ("vllm", "in_place")])
async def test_a_turn_across_two_updates_that_keep_it_loses_nothing_uncounted(kind: str, mode: str):
    """Its request continues, so what came before the first update misses its next version, and the sample says so.

    What came between the two meets its own in the sweep before the third, when the turn has ended.
    """
    async with routing(kind, step=LONG) as router:
        [worker] = router.workers
        session = await router.create()
        asking = asyncio.create_task(router.turn(session))
        await router.sampling()
        for version in (1, 2):
            await router.verb("/pause_generation", mode=mode)
            await router.verb("/update_weights_from_disk", model_path="/weights/b", weight_version=str(version))
            [frozen] = worker.engine.live
            await router.verb("/continue_generation")
            await eventually(lambda frozen=frozen: any(live.sampled > frozen.sampled for live in worker.engine.live))
        hurry(router.workers)
        assert (await asking).status_code == 200
        [turn] = await router.turns(session)
        before = await router.sample(session)
        await router.verb("/pause_generation", mode=mode)
        after = await router.sample(session)
        await router.verb("/continue_generation")

    counts = Counter(before["behavior_versions"])
    assert (turn["status"], len(turn["segments"])) == ("completed", 1)
    assert counts.keys() - {-1} == {0, 1, 2}
    assert before["proximal_versions"] == before["behavior_versions"]
    assert before["metadata"]["weight_updates"] == {"keep": 2}
    assert before["metadata"]["staleness"]["proximal_share"] == 0.0
    expected = [2 if version == 1 else version for version in before["behavior_versions"]]
    assert after["proximal_versions"] == expected
    sampled = sum(counts.values()) - counts[-1]
    assert after["metadata"]["staleness"]["proximal_share"] == pytest.approx(counts[1] / sampled)
    columns = [as_ids(after[name]) for name in ("behavior_versions", "proximal_versions")]
    assert count_next_versions([(columns[0], columns[1], 2)]) == NextVersions(counts[0] + counts[1], counts[1])


async def test_what_waits_for_the_live_version_is_scored_before_it_goes():
    """A session in a tool call asks for nothing meanwhile: the pause of the next update is its last moment."""
    async with routing(*KINDS) as router:
        session = await router.create()
        assert (await router.turn(session)).status_code == 200
        for version in (1, 2):
            await router.verb("/pause_generation")
            await router.verb("/update_weights_from_disk", model_path="/weights/b", weight_version=str(version))
            await router.verb("/continue_generation")
        sample = await router.sample(session)

    assert set(sample["proximal_versions"]) - {-1} == {1}
    require_true_proximal(sample, newest=1)


async def test_the_gate_is_shut_before_workers_are_told_and_opened_after():
    """A turn that came in between would be asked of a worker that stands still, and cut."""
    async with routing("sglang") as router:
        [worker] = router.workers
        session = await router.create()
        seen = []
        for path in ("/pause_generation", "/continue_generation"):
            worker.holds[path] = asyncio.Event()
            asked = len(worker.posted)
            telling = asyncio.create_task(router.verb(path))
            await eventually(lambda asked=asked: len(worker.posted) > asked)
            seen.append(router.gate)
            worker.holds[path].set()
            await telling
            seen.append(router.gate)
            if path == "/pause_generation":
                waiting = asyncio.create_task(router.turn(session))
                await eventually(lambda: router.server.gatekeeper.held == 1)

        assert seen == [GateState.PAUSED, GateState.PAUSED, GateState.PAUSED, GateState.OPEN]
        assert (await waiting).status_code == 200


async def test_new_weights_without_a_pause_shut_the_gate_for_their_time():
    """What the update cuts short continues under the weights that it brought."""
    async with routing(*KINDS, step=LONG) as router:
        session = await router.create()
        asking = asyncio.create_task(router.turn(session))
        await router.sampling()
        body = {"model_path": "/weights/b", "weight_version": "1", "abort_all_requests": True}
        await router.verb("/update_weights_from_disk", **body)
        assert router.gate is GateState.OPEN
        await router.sampling()  # under the first of them, before the second come
        await router.verb("/abort_request", abort_all=True)
        await router.verb("/update_weight_version", new_version="2")
        hurry(router.workers)
        answer = await asking
        [turn] = await router.turns(session)
        sample = await router.sample(session)

    assert (answer.status_code, turn["status"]) == (200, "completed")
    assert max(sample["behavior_versions"]) == 2
    require_true_proximal(sample, newest=2)


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/update_weights_from_distributed"])
async def test_weights_without_a_label_keep_the_gate_shut_until_it_comes(path: str):
    """Or until nothing has come for a while: a turn under the old label would be of the new weights."""
    async with routing("sglang") as router:
        session = await router.create()
        for wait in (False, True):
            for _ in range(2):
                await router.verb(path, model_path="/weights/b")
                assert router.gate is GateState.PAUSED
            if wait:
                router.pass_time(60)
                await eventually(lambda: router.gate is GateState.OPEN)
            else:
                await router.verb("/update_weight_version", new_version="1")
        assert router.gate is GateState.OPEN
        assert (await router.turn(session)).status_code == 200


async def test_an_abort_that_nothing_follows_is_the_end_of_a_rollout():
    """Turns in flight are stored as ABORTED and answered 404; sessions of the next rollout come after."""
    async with routing(*KINDS, step=LONG) as router:
        session, idle = await router.create(), await router.create()
        asking = asyncio.create_task(router.turn(session))
        await router.sampling()
        await router.verb("/abort_request", abort_all=True)
        creating = asyncio.create_task(router.create())
        await eventually(lambda: router.server.gatekeeper.held == 2)
        router.pass_time(60)
        answer = await asking
        [turn] = await router.turns(session)

        assert (answer.status_code, answer.headers["x-should-retry"], turn["status"]) == (404, "false", "aborted")
        assert (await router.turn(idle)).status_code == 404
        assert router.gate is GateState.OPEN
        hurry(router.workers)
        assert (await router.turn(await creating)).status_code == 200


async def test_an_abort_beside_an_update_is_for_the_update():
    """Its worker may wait for the turns in flight: it hears of the abort at once, and no rollout ends by it."""
    async with routing("sglang", step=LONG) as router:
        [worker] = router.workers
        session = await router.create()
        asking = asyncio.create_task(router.turn(session))
        await router.sampling()
        loading = worker.holds["/update_weights_from_disk"] = asyncio.Event()
        body = {"model_path": "/weights/b", "weight_version": "1"}
        updating = asyncio.create_task(router.verb("/update_weights_from_disk", **body))
        await eventually(lambda: "/update_weights_from_disk" in worker.posted)
        await router.verb("/abort_request", abort_all=True)
        loading.set()
        await updating

        assert router.gate is GateState.OPEN
        hurry(router.workers)
        assert (await asking).status_code == 200
        assert set((await router.sample(session))["behavior_versions"]) - {-1} == {0, 1}


async def test_a_drain_says_that_an_abort_is_the_end():
    """Nobody waits for what follows then, whichever of the two came first."""
    async with routing("sglang", step=LONG) as router:
        for verbs in (("/abort_request", "/sessions/drain"), ("/sessions/drain", "/abort_request")):
            session = await router.create()
            asking = asyncio.create_task(router.turn(session))
            await router.sampling()
            for path in verbs:
                await router.verb(path, **({"abort_all": True} if path == "/abort_request" else {}))
            assert (await asking).status_code == 404
            await eventually(lambda: [hold.holder for hold in router.server.gatekeeper.gate.holds] == ["anonymous"])
            await router.verb("/sessions/resume")


@pytest.mark.parametrize(
    ("path", "holder"),
    [
        ("/pause_generation", "update-1"),
        ("/update_weight_version", "update-1"),
        ("/continue_generation", "update-1"),
        ("/continue_generation", "trainer-1"),
    ],
)
async def test_while_somebody_else_has_the_engines_a_verb_is_refused(path: str, holder: str):
    """And no worker told: two updates that interleave leave weights of neither."""
    async with routing("sglang") as router:
        [worker] = router.workers
        await router.verb("/sessions/pause", holder=holder, engines=True)
        asked = list(worker.posted)
        refused = await router.verb(path, status=409, new_version="7")

        assert refused["error"]["code"] == "engines_held"
        assert worker.posted == asked
        await router.verb("/abort_request", abort_all=True)
        await router.verb("/sessions/resume", holder=holder, engines_continued=True)
        assert router.gate is GateState.OPEN


async def test_a_trainer_that_pauses_and_falls_silent_shuts_nobody_out_for_ever():
    """Its hold runs out, the engines are continued, and it may begin again."""
    async with routing(*KINDS) as router:
        await router.verb("/pause_generation")
        session = asyncio.create_task(router.create())
        router.pass_time(HOLD_TTL_S - 1)
        await router.verb("/pause_generation")
        router.pass_time(HOLD_TTL_S - 1)
        assert router.gate is GateState.PAUSED
        router.pass_time(2)
        assert (await router.turn(await session)).status_code == 200

        await router.verb("/continue_generation")
        await router.verb("/pause_generation")
        assert router.gate is GateState.PAUSED
        await router.verb("/continue_generation")
        assert router.gate is GateState.OPEN


async def test_a_router_that_is_started_again_in_the_middle_of_an_update_is_still_paused(tmp_path: Path):
    """Until the trainer says that it is over. Workers that stand still continue, too."""
    async with started_again(tmp_path, "/pause_generation") as (router, session):
        asking = asyncio.create_task(router.turn(session))
        await eventually(lambda: router.server.gatekeeper.held == 1)
        router.pass_time(60)
        await router.verb("/update_weights_from_disk", model_path="/weights/b", weight_version="1")
        assert router.gate is GateState.PAUSED
        await router.verb("/continue_generation")
        assert (await asking).status_code == 200
        assert set((await router.sample(session))["behavior_versions"]) - {-1} == {1}


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [("/abort_request", {"abort_all": True}, 404), ("/update_weights_from_disk", {"model_path": "/weights/b"}, 200)],
    ids=["an abort", "parts of weights"],
)
async def test_a_router_that_is_started_again_opens_in_time(
    tmp_path: Path, path: str, fields: dict[str, object], status: int
):
    """When nothing follows, as it would have: an abort ends the rollout, whose sessions are over; others are served."""
    async with started_again(tmp_path, path, **fields) as (router, session):
        assert router.gate is GateState.PAUSED
        router.pass_time(60)
        await eventually(lambda: router.gate is GateState.OPEN)
        assert (await router.turn(session)).status_code == status


@pytest.mark.parametrize("verb", ["/pause_generation", "/continue_generation"])
async def test_a_verb_that_breaks_off_leaves_no_worker_paused(verb: str):
    """A router that stops cuts it short; nobody knows then who obeyed, so the server continues the engines itself."""
    async with routing("sglang") as router:
        [worker] = router.workers
        verbs, telling = TrainerVerbs(router.server), asyncio.Event()
        if verb == "/continue_generation":
            await router.verb("/pause_generation")

        async def tell() -> Sequence[VerbResult]:
            telling.set()
            await asyncio.Event().wait()
            return ()

        carrying_out = asyncio.create_task(verbs.carry_out(VerbOrder(verb, "POST", "", b"{}"), tell))
        await telling.wait()
        carrying_out.cancel()
        await asyncio.wait({carrying_out})

        assert router.gate is GateState.OPEN
        await eventually(lambda: "/continue_generation" in worker.posted)


async def test_a_continue_that_no_worker_heard_is_made_good():
    """The gateway listed none at the time: those that stand still are continued by the server."""
    async with routing("sglang") as router:
        [worker] = router.workers
        await router.verb("/pause_generation")

        async def tell() -> Sequence[VerbResult]:
            return ()

        await TrainerVerbs(router.server).carry_out(VerbOrder("/continue_generation", "POST", "", b"{}"), tell)
        await eventually(lambda: "/continue_generation" in worker.posted)


@pytest.mark.parametrize("verb", ["/sessions/pause", "/sessions/resume"])
async def test_an_abort_that_somebody_else_answers_ends_nothing(verb: str):
    """Who shuts the gate after it knows what for, and so does an operator who opens it."""
    async with routing("sglang") as router:
        session = await router.create()
        await router.verb("/abort_request", abort_all=True)
        [hold] = router.server.gatekeeper.gate.holds
        await router.verb(verb, holder="operator" if verb == "/sessions/pause" else hold.holder)
        router.pass_time(6)
        await eventually(lambda: hold.holder not in {each.holder for each in router.server.gatekeeper.gate.holds})
        await router.verb("/sessions/pause", holder="operator")
        await router.verb("/sessions/resume", holder="operator")

        assert (await router.turn(session)).status_code == 200


async def test_parts_of_weights_are_swept_for_once_under_a_drain(monkeypatch: pytest.MonkeyPatch):
    """After the first part nothing can be scored under the old label any more, whoever else shuts the gate."""
    async with routing("sglang") as router:
        sweeps: list[SweepRequest] = []
        sweep = router.server.sweep

        async def note(asked: SweepRequest) -> SweepReport:
            sweeps.append(asked)
            return await sweep(asked)

        monkeypatch.setattr(router.server, "sweep", note)
        await router.verb("/sessions/drain")
        for _ in range(3):
            await router.verb("/update_weights_from_distributed")
            router.pass_time(1)
            await asyncio.sleep(0.05)
        await eventually(lambda: bool(sweeps))

    assert len(sweeps) == 1
