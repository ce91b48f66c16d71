"""The router in front of a real SGLang and a real vLLM, one of which is killed while it samples."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from harness.engines.pool.pool import EnginePool
from harness.gateway.router.gateway_program import gateway_program
from harness.gateway.router.routed import RouterSettings, open_routed
from harness.lab.lanes import LaneEngine, LaneSpec, open_lane
from harness.server.serving import serve
from harness.server.store.connect import open_store
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Json, Message
from tests.builders import user
from tests.looping_prompt import SERVED_CONFIG
from tests.real_engines import CONTEXT_TOKENS
from tests.session_servers.store_file import ledger_of, read_file

DEADLINE_S = 120
SESSIONS = 6
VERBS = ("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache")
ABORT_ALL = {"abort_all": True}
SAMPLING = {"max_tokens": 120, "temperature": 0, "stop": [".", ",", "\n"]}
"""Answers end soon and by themselves, so that every branch can go on."""


@dataclass
class Talk:
    """One session, whose agent goes on from every answer."""

    http: httpx.AsyncClient
    session_id: str
    messages: list[Message] = field(default_factory=lambda: [user("Tell me about the river Rhine.")])

    async def turn(self) -> int:
        """The status of the answer."""
        body = {"model": "m", "messages": self.messages, **SAMPLING}
        answer = await self.http.post(f"/sessions/{self.session_id}/v1/chat/completions", json=body)
        if answer.status_code == 200:
            self.messages += [answer.json()["choices"][0]["message"], user("And what else?")]
        return answer.status_code

    async def record(self) -> Json:
        record: Json = (await self.http.get(f"/sessions/{self.session_id}")).json()
        return record


@asynccontextmanager
async def routing(
    model_dir: Path, store: Path, *worker_urls: str
) -> AsyncIterator[tuple[httpx.AsyncClient, EnginePool]]:
    """A router in front of both workers: a client of it, and its pool."""
    settings = RouterSettings(worker_urls=worker_urls)
    chat_tokenizer = open_chat_tokenizer(model_dir)
    vocab_size = chat_tokenizer.tokenizer.vocab_size
    async with (
        open_routed(settings, gateway_program("smg", print), vocab_size=vocab_size) as routed,
        serve(routed.pool, chat_tokenizer, open_store(str(store)), around=routed.around) as running,
        httpx.AsyncClient(base_url=running.url, timeout=DEADLINE_S) as http,
    ):
        async with asyncio.timeout(DEADLINE_S):
            while {status.name for status in routed.pool.workers} != set(worker_urls):
                await asyncio.sleep(0.1)
        yield http, routed.pool


@asynccontextmanager
async def keeping_its_label(url: str) -> AsyncIterator[int]:
    """The SGLang at `url`, which others use too, calls its weights afterwards what it calls them now: this version."""
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
        label = (await http.get("/model_info")).json()["weight_version"]
        try:
            yield int(label) if label.isdecimal() else 0
        finally:
            body = {"new_version": label, "abort_all_requests": False}
            (await http.post("/update_weight_version", json=body)).raise_for_status()


async def load_weights(http: httpx.AsyncClient, model_dir: Path, version: str) -> None:
    """Every worker loads `model_dir` as `version`, and the pool has noticed."""
    body = {"model_path": str(model_dir), "weight_version": version, "flush_cache": True}
    loaded = await http.post("/update_weights_from_disk", json=body)
    assert (loaded.status_code, loaded.json()["succeeded"]) == (200, 2), loaded.text
    async with asyncio.timeout(DEADLINE_S):
        while {each["weight_version"] for each in (await standing(http)).values()} != {version}:
            await asyncio.sleep(0.1)


async def standing(http: httpx.AsyncClient) -> dict[str, Json]:
    """Each worker, as the sessions' pool sees it."""
    workers = (await http.get("/router")).json()["sessions"]["workers"]
    return {worker["name"]: worker for worker in workers}


async def test_a_killed_worker_costs_no_session(sglang_url, model_dir, tmp_path):
    """Control reaches both; vLLM dies in the middle of turns; everybody goes on, and every token is accounted for."""
    # One more server beside the shared ones, which must not be killed: it has to be small.
    env = SERVED_CONFIG.to_environ() | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    arguments = ("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(SESSIONS))
    spec = LaneSpec(LaneEngine.VLLM, model_dir, env=env, arguments=arguments)
    store = tmp_path / "sessions.db"
    async with (
        open_lane(spec) as lane,
        keeping_its_label(sglang_url) as found,
        routing(model_dir, store, sglang_url, lane.url) as (http, pool),
    ):
        # A worker that stands behind another one serves nobody, and sessions stay where they began: both begin alike.
        await load_weights(http, model_dir, str(found + 1))
        created = [(await http.post("/sessions", json={})).json() for _ in range(SESSIONS)]
        talks = [Talk(http, each["session_id"]) for each in created]
        assert Counter([await talk.turn() for talk in talks]) == {200: SESSIONS}
        for verb in VERBS:
            answer = await http.post(verb, json=ABORT_ALL if verb == "/abort_request" else {})
            assert (answer.status_code, answer.json()["succeeded"]) == (200, 2), answer.text

        version = str(found + 2)
        await load_weights(http, model_dir, version)
        assert Counter(await asyncio.gather(*(talk.turn() for talk in talks))) == {200: SESSIONS}

        there = (await standing(http))[lane.url]["sessions"]
        assert 0 < there < SESSIONS
        asked = [asyncio.create_task(talk.turn()) for talk in talks]
        async with asyncio.timeout(DEADLINE_S):
            # Looked at in every round of the loop: over HTTP a short turn can be over between two looks.
            while not any(worker.name == lane.url and worker.in_flight for worker in pool.workers):
                await asyncio.sleep(0)
        os.killpg(lane.group, signal.SIGKILL)
        broken = Counter(await asyncio.gather(*asked))
        after = Counter(await asyncio.gather(*(talk.turn() for talk in talks)))
        dead = (await http.post("/flush_cache", json={})).json()
        metrics = (await http.get("/router/metrics")).text
        records = [await talk.record() for talk in talks]

    ledgers = {record["session_id"]: record["ledger"] for record in records}
    seen = [[span["version"] for span in record["turns"][1]["weight_versions"]] for record in records]
    assert seen == [[version]] * SESSIONS, (
        "the second turn of every session was sampled by the weights that were loaded"
    )
    assert broken.keys() <= {200, 502}
    assert broken[502] <= there
    assert after == {200: SESSIONS}
    assert dead["failed"] == [lane.url]
    assert f"harness_sessions_moved_total {there}.0" in metrics
    file = read_file(store)
    assert ledgers == {session_id: ledger_of(file[session_id]) for session_id in ledgers}
    for ledger in ledgers.values():
        assert ledger["generated"] == ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
