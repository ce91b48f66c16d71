"""Control verbs reach every worker, and the report says what became of each."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest_asyncio
from starlette.types import Receive, Scope, Send

from harness.engines.scripted import ScriptStep
from harness.types import GenerationRequest, SamplingParams, as_ids
from server_patch.router.app import open_http
from server_patch.router.fan_out import Updates, Worker, engine_of, fan_out, report, status_of
from server_patch.router.verbs import VERBS, Engine, VerbOrder, VerbResult
from tests.fake_engines.fake_server import UNFIT_WEIGHTS, FakeServer
from tests.fake_engines.workers import fake_workers, serving_app
from tests.session_servers.served import eventually

PAUSE = VerbOrder("/pause_generation", "POST", "", b'{"mode": "abort"}')
CONTINUE = VerbOrder("/continue_generation", "POST", "", b"{}")
SLOWLY = ScriptStep(text="The quick brown fox jumps over the lazy dog. " * 40, token_delay_s=0.004)


@pytest_asyncio.fixture(name="http")
async def _http() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_http() as http:
        yield http


def update_to(version: str, path: Path = Path("/weights/b")) -> VerbOrder:
    """The weights in `path`, as `version`."""
    body = json.dumps({"model_path": str(path), "weight_version": version}).encode()
    return VerbOrder("/update_weights_from_disk", "POST", "", body)


def workers_of(fakes: list[FakeServer]) -> list[Worker]:
    """The fakes as a gateway would list them."""
    kinds = [Engine.VLLM if "VLLM" in type(fake).__name__ else Engine.SGLANG for fake in fakes]
    return [Worker(fake.url, kind) for fake, kind in zip(fakes, kinds, strict=True)]


@asynccontextmanager
async def nobody() -> AsyncIterator[Worker]:
    """A worker that is dead: nothing listens there."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        yield Worker(f"http://127.0.0.1:{deaf.getsockname()[1]}", Engine.SGLANG)


@asynccontextmanager
async def mute() -> AsyncIterator[Worker]:
    """A worker that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Worker(f"http://127.0.0.1:{listener.getsockname()[1]}", Engine.SGLANG)


def successes(outcomes: list[VerbResult]) -> list[bool]:
    return [outcome.succeeded for outcome in outcomes]


async def test_every_verb_reaches_an_sglang_and_a_vllm_worker(http):
    """Both are told in their own words; vLLM has none for weights that come in a message."""
    bodies = {
        "/update_weights_from_disk": {"model_path": "/weights/b", "weight_version": "1"},
        "/update_weight_version": {"new_version": "2"},
        "/abort_request": {"abort_all": True},
    }
    async with fake_workers("sglang", "vllm") as fakes:
        for verb in VERBS:
            order = VerbOrder(verb, "POST", "", json.dumps(bodies.get(verb, {})).encode())
            obeyed = [True, verb not in ("/update_weights_from_distributed", "/update_weights_from_tensor")]
            assert successes(await fan_out(http, workers_of(fakes), order)) == obeyed, verb

        assert [fake.engine.weight_version for fake in fakes] == ["2", "2"]
        assert {"/pause", "/resume", "/reset_prefix_cache", "/abort_requests"} <= set(fakes[1].paths)


async def test_a_dead_worker_is_reported_and_the_others_obey(http):
    """One line of the report, no failure of the verb elsewhere."""
    async with fake_workers("sglang", "vllm") as fakes, nobody() as dead:
        workers = [workers_of(fakes)[0], dead, workers_of(fakes)[1]]
        outcomes = await fan_out(http, workers, PAUSE)

        assert successes(outcomes) == [True, False, True]
        assert (outcomes[1].url, outcomes[1].status) == (dead.url, None)
        assert "cannot be reached" in outcomes[1].error
        told = report(PAUSE, outcomes)
        assert (told["success"], told["failed"], told["succeeded"]) == (False, [dead.url], 2)
        assert status_of(outcomes) == 207


async def test_a_worker_that_never_answers_costs_its_own_deadline_only(http):
    async with fake_workers("sglang") as fakes, mute() as silent:
        for deadline_s in (0.5, 4, 32):  # the other one needs more on a busy machine
            outcomes = await fan_out(http, [silent, *workers_of(fakes)], PAUSE, deadline_s=deadline_s)
            if any(successes(outcomes)):
                break

        assert successes(outcomes) == [False, True]
        assert outcomes[0].error == f"no answer within {deadline_s} s"
        assert outcomes[1].seconds < outcomes[0].seconds


async def test_statuses_of_a_report():
    done = VerbResult("http://a", "sglang", True, 200, None, 0.1, "")
    failed = VerbResult("http://b", "sglang", False, 500, None, 0.1, "no")

    assert [status_of(each) for each in ([done, done], [done, failed], [failed], [])] == [200, 207, 502, 503]


async def test_a_refused_update_is_a_failure_of_that_worker(http):
    """With SGLang's own words; a vLLM worker stays paused, because its weights may be gone."""
    body = json.dumps({"model_path": str(UNFIT_WEIGHTS), "weight_version": "1"}).encode()
    async with fake_workers("sglang", "vllm") as fakes:
        outcomes = await fan_out(http, workers_of(fakes), VerbOrder("/update_weights_from_disk", "POST", "", body))

        assert successes(outcomes) == [False, False]
        assert outcomes[0].body["message"] == "shapes differ"
        assert "/resume" not in fakes[1].paths
        assert [fake.engine.weight_version for fake in fakes] == ["0", "updating-1"]
        await fan_out(http, workers_of(fakes), CONTINUE)


async def test_a_refusal_that_comes_in_pieces_is_one(http):
    """200 and `success: false`, of which the first bytes arrive alone."""

    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"success": fal', "more_body": True})
        await asyncio.sleep(0.05)
        await send({"type": "http.response.body", "body": b'se, "message": "no"}'})

    async with serving_app(refusing) as url:
        [outcome] = await fan_out(http, [Worker(url, Engine.SGLANG)], PAUSE)

    assert (outcome.succeeded, outcome.body) == (False, {"success": False, "message": "no"})


async def test_a_paused_vllm_worker_stays_paused_over_an_update(http):
    body = b'{"model_path": "/weights/b", "weight_version": "1"}'
    async with fake_workers("vllm") as fakes:
        await fan_out(http, workers_of(fakes), PAUSE)
        await fan_out(http, workers_of(fakes), VerbOrder("/update_weights_from_disk", "POST", "", body))

        assert "/resume" not in fakes[0].paths
        assert fakes[0].engine.weight_version == "1"
        await fan_out(http, workers_of(fakes), CONTINUE)


async def test_an_update_after_one_that_failed_continues_the_vllm_worker(http):
    """Nobody but the first update has paused it, so nobody else would."""
    updates = Updates()
    async with fake_workers("vllm") as fakes:
        await fan_out(http, workers_of(fakes), update_to("1", UNFIT_WEIGHTS), updates=updates)
        paused = fakes[0]._paused
        await fan_out(http, workers_of(fakes), update_to("1"), updates=updates)

        assert (paused, fakes[0]._paused) == (True, False)
        assert fakes[0].engine.weight_version == "1"


async def test_a_pause_by_the_client_after_an_update_that_failed_is_the_client_s_to_end(http):
    updates = Updates()
    async with fake_workers("vllm") as fakes:
        for order in (update_to("1", UNFIT_WEIGHTS), PAUSE, update_to("1")):
            await fan_out(http, workers_of(fakes), order, updates=updates)

        assert fakes[0]._paused
        await fan_out(http, workers_of(fakes), CONTINUE, updates=updates)


async def test_two_updates_of_a_vllm_worker_come_one_after_the_other(http):
    """A client that gave up on the first one asks again; between them the weights of neither would have a label."""
    updates = Updates()
    async with fake_workers("vllm") as fakes:
        [fake] = fakes
        fake.holds["/collective_rpc"] = asyncio.Event()
        first = asyncio.create_task(fan_out(http, workers_of(fakes), update_to("1"), updates=updates))
        await eventually(lambda: "/collective_rpc" in fake.posted)
        second = asyncio.create_task(fan_out(http, workers_of(fakes), update_to("2"), updates=updates))
        for _ in range(20):
            await asyncio.sleep(0.005)
        fake.holds["/collective_rpc"].set()
        await asyncio.gather(first, second)

        one = ["/pause", "/update_weight_version", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
        assert fake.posted == [*one, "/resume"] * 2
        assert fake.engine.weight_version == "2"


async def test_an_abort_by_the_client_s_id_ends_the_request_on_vllm(http):
    """To the bare id vLLM itself would have answered `aborted: 1` and gone on sampling."""
    async with fake_workers("vllm", step=SLOWLY) as fakes:
        ids, params = as_ids([40, 41, 42]), SamplingParams(max_new_tokens=400)
        running = asyncio.create_task(fakes[0].engine.generate(GenerationRequest(ids, params, request_id="mine")))
        await eventually(lambda: bool(fakes[0].engine.live))
        await fan_out(http, workers_of(fakes), VerbOrder("/abort_request", "POST", "", b'{"rid": "mine"}'))

        assert (await running).finish_reason == "abort"


async def test_engines_are_told_apart_while_they_are_paused(http):
    """No route is asked that needs a token to be sampled."""
    async with fake_workers("sglang", "vllm") as fakes, nobody() as dead:
        await fan_out(http, workers_of(fakes), PAUSE)

        assert [await engine_of(http, fake.url) for fake in fakes] == [Engine.SGLANG, Engine.VLLM]
        assert await engine_of(http, dead.url) is None
        await fan_out(http, workers_of(fakes), CONTINUE)
