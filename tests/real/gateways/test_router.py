"""The whole router as its users have it: a process, real gateway, workers as processes, one of which is killed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest_asyncio

from harness.types import Message
from server_patch.router.app import open_http
from server_patch.router.gateway import launch
from tests.builders import user
from tests.fake_engines.workers import PATIENCE_S, WorkerProcess, WorkerProcesses, worker_processes
from tests.free_ports import free_ports
from tests.router_process import Router, routing
from tests.session_servers.store_file import ledger_of, read_file

SESSIONS = 8
VERSIONED = {"model_path": "/weights/b", "weight_version": "1"}


@dataclass
class Talk:
    """One session and its agent, which continues from every answer."""

    router: Router
    session_id: str
    api_key: str
    messages: list[Message] = field(default_factory=list)

    @classmethod
    async def begin(cls, router: Router) -> "Talk":
        status, created = await router.post("/sessions", {})
        assert status == 200, created
        return cls(router, created["session_id"], created["api_key"], [user(f"hello from {created['session_id']}")])

    async def turn(self) -> int:
        """Take one turn; the status of its answer. The next one continues from it, or asks the same again."""
        body = {"model": "m", "messages": self.messages}
        status, answer = await self.router.post(f"/sessions/{self.session_id}/v1/chat/completions", body, self.api_key)
        if status == 200:
            self.messages += [answer["choices"][0]["message"], user(f"continue, {len(self.messages)}")]
        return status


@pytest_asyncio.fixture(name="workers")
async def _workers() -> AsyncIterator[WorkerProcesses]:
    async with worker_processes() as workers:
        yield workers


async def test_a_killed_worker_costs_no_session_that_had_no_turn_there(smg, workers, tmp_path):
    """Control reaches both; one dies with turns in flight; everybody continues, and every token is accounted for."""
    first = await workers.start("sglang", port=free_ports(), token_delay_s=0.03)
    second = await workers.start("vllm", token_delay_s=0.03)
    async with routing(tmp_path, "--worker-urls", f"{first.url},{second.url}") as router:
        await router.serving(first.url, second.url)
        talks = [await Talk.begin(router) for _ in range(SESSIONS)]
        assert await all_take_a_turn(talks) == {200: SESSIONS}
        for verb, body in [
            ("/pause_generation", {}),
            ("/continue_generation", {}),
            ("/update_weights_from_disk", VERSIONED),
        ]:
            status, report = await router.post(verb, body)
            assert (status, report["succeeded"], report["total"]) == (200, 2, 2), report

        busy = talks[: SESSIONS // 2]
        there = (await router.standing())[first.url]["sessions"]
        before = await bodies_at(first, second)
        asked = [asyncio.create_task(talk.turn()) for talk in busy]
        async with asyncio.timeout(PATIENCE_S):
            while await bodies_at(first, second) < before + len(busy):
                await asyncio.sleep(0.02)
        await first.kill()
        broken = Counter(await asyncio.gather(*asked))
        after = [await all_take_a_turn(talks) for _ in range(2)]

        assert 0 < there < SESSIONS
        assert broken.keys() <= {200, 502}
        assert after == [{200: SESSIONS}] * 2
        assert await router.metric("harness_sessions_moved_total") == there
        assert await router.metric("harness_prefix_tokens_recomputed_total") > 0
        status, report = await router.post("/flush_cache", {})
        assert (status, report["failed"]) == (207, [first.url])

        back = await workers.start("sglang", port=first.port)
        assert back.url == first.url
        await router.post("/update_weight_version", {"new_version": "1"})
        await router.serving(first.url, second.url)
        records = {talk.session_id: (await router.http.get(f"/sessions/{talk.session_id}")).json() for talk in talks}

    file = read_file(router.store)
    for session_id, record in records.items():
        ledger = record["ledger"]
        assert ledger == ledger_of(file[session_id])
        assert ledger["generated"] == ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
        assert ledger["trained"] > 0


async def all_take_a_turn(talks: list[Talk]) -> Counter[int]:
    """How often each status was the answer."""
    return Counter(await asyncio.gather(*(talk.turn() for talk in talks)))


async def bodies_at(*workers: WorkerProcess) -> int:
    """How many bodies have come to them."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        return sum([len((await http.get(f"{each.url}/seen")).json()["bodies"]) for each in workers])


async def test_a_running_gateway_is_fronted(smg, workers, tmp_path):
    """Its workers are found, one that is added joins, one that is removed is left; what is the gateway's passes."""
    first, second = [await workers.start() for _ in range(2)]
    async with (
        open_http() as http,
        launch(http, smg.executable, smg.kind, [first.url], log_file=tmp_path / "gateway.log") as gateway,
        routing(tmp_path, "--router-url", gateway.url) as outer,
    ):
        await outer.serving(first.url)
        status, _ = await outer.post("/workers", {"url": second.url})
        assert status == 202
        await outer.serving(first.url, second.url)
        talk = await Talk.begin(outer)
        assert await talk.turn() == 200
        listed: list[Any] = (await outer.http.get("/workers")).json()["workers"]
        [first_id] = [each["id"] for each in listed if each["url"] == first.url]
        assert (await outer.http.delete(f"/workers/{first_id}")).status_code == 202
        await outer.serving(second.url)

        assert await talk.turn() == 200
        assert (await outer.http.get("/health")).text == "OK"
        assert [each["id"] for each in (await outer.http.get("/v1/models")).json()["data"]] == ["scripted"]
