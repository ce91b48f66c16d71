"""SGLang's control verbs at a session server whose engine runs in its own process: sessions take part in them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from harness import abort_rollout
from harness.engines.scripted import ScriptedEngine, ScriptStep
from harness.engines.sglang_server import NativeServer
from harness.gateway.router.trainer_verbs import with_verbs
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import open_store
from tests.builders import toy_template, user
from tests.fake_engines.providers import scripted_engine, toy_tokenizer
from tests.fake_engines.workers import LONG
from tests.session_servers.served import PATIENCE_S, eventually

BODY = {"model": "m", "messages": [user("Hi.")]}
OPERATOR = {"authorization": "Bearer secret"}


@asynccontextmanager
async def serving(engine: ScriptedEngine, **settings: str) -> AsyncIterator[httpx.AsyncClient]:
    """A session server with the engine's verbs at its URL."""
    chosen = ServerSettings(**settings)
    native = NativeServer(engine, toy_tokenizer(), Path("/weights/first"))
    opening = serve(engine, toy_template(), open_store("memory"), chosen, around=with_verbs(native, chosen))
    async with opening as running, httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as http:
        yield http


async def test_an_update_inside_a_turn_leaves_one_turn_of_both_versions():
    """By pause, weights, continue; each token that met its next version is scored by it."""
    engine = scripted_engine(LONG)
    engine.relabel("0")
    async with serving(engine) as http:
        session = (await http.post("/sessions", json={})).json()["session_id"]
        turn = asyncio.ensure_future(http.post(f"/sessions/{session}/v1/chat/completions", json=BODY))
        await eventually(lambda: any(live.sampled for live in engine.live))
        for verb, body in (
            ("/pause_generation", {}),
            ("/update_weights_from_disk", {"model_path": "/weights/1", "weight_version": "1"}),
            ("/continue_generation", {}),
        ):
            answer = await http.post(verb, json=body)
            assert answer.status_code == 200, answer.text
        engine.hurries = True
        answered = await turn
        [turn_record] = (await http.get(f"/sessions/{session}")).json()["turns"]
        [sample] = (await http.get(f"/sessions/{session}/samples")).json()["samples"]

    assert answered.status_code == 200
    assert turn_record["status"] == "completed"
    pairs = set(zip(sample["behavior_versions"], sample["proximal_versions"], sample["loss_mask"], strict=False))
    assert {(behavior, proximal) for behavior, proximal, _ in pairs if behavior >= 0} == {(0, 1), (1, 1)}


async def test_verbs_need_the_admin_token():
    """Refused without a trace in the engine; a session's key is none."""
    engine = scripted_engine(LONG)
    async with serving(engine, admin_token="secret") as http:
        created = await http.post("/sessions", json={}, headers=OPERATOR)
        key = {"authorization": f"Bearer {created.json()['api_key']}"}
        refused = [
            (await http.post("/pause_generation", json={}, headers=headers)).status_code for headers in ({}, key)
        ]
        was_paused = (await engine.health()).paused
        accepted = await http.post("/pause_generation", json={}, headers=OPERATOR)
        is_paused = (await engine.health()).paused
        await http.post("/continue_generation", json={}, headers=OPERATOR)

    assert (refused, was_paused) == ([401, 401], False)
    assert (accepted.status_code, is_paused) == (200, True)


async def test_a_verb_that_the_engine_refuses_holds_nobody():
    """Its own words come back, and the gate is open."""
    engine = scripted_engine(ScriptStep(text="Understood."))
    async with serving(engine) as http:
        session = (await http.post("/sessions", json={})).json()["session_id"]
        refused = await http.post("/pause_generation", json={"mode": "sideways"})
        unreadable = await http.post("/update_weights_from_disk", content=b"[")
        answered = await http.post(f"/sessions/{session}/v1/chat/completions", json=BODY)

    assert (refused.status_code, unreadable.status_code, answered.status_code) == (400, 400, 200)
    assert "sideways" in refused.text


async def test_a_body_that_is_too_large_is_not_read():
    """It is refused by its length, before any of it has been sent."""
    async with serving(scripted_engine(LONG)) as http, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(b"POST /pause_generation HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        answer = await reader.readuntil(b"}}")
        writer.transport.abort()

    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body_bytes" in answer


async def test_everything_else_is_the_session_server_s():
    """Its health is its own, and it generates for sessions only."""
    async with serving(scripted_engine(LONG)) as http:
        health = await http.get("/health")
        generated = await http.post("/generate", json={"input_ids": [1]})
        asked = await http.get("/pause_generation")

    assert health.status_code == 200
    assert (generated.status_code, asked.status_code) == (404, 404)


async def test_an_abort_of_the_harness_ends_what_the_engine_samples():
    """With the URL of the server as that of its engine; sessions are served afterwards."""
    engine = scripted_engine(LONG, LONG)
    async with serving(engine) as http:
        url = str(http.base_url).rstrip("/")
        session = (await http.post("/sessions", json={})).json()["session_id"]
        turn = asyncio.ensure_future(http.post(f"/sessions/{session}/v1/chat/completions", json=BODY))
        await eventually(lambda: any(live.sampled for live in engine.live))
        report = await abort_rollout([turn], session_servers=[url], engine_workers=[f"sglang={url}"])
        after = await http.post("/sessions", json={})
        [record] = (await http.get(f"/sessions/{session}")).json()["turns"]

    assert (turn.result().status_code, after.status_code, record["status"]) == (404, 200, "aborted")
    assert [answer.error for answer in report.engines] == [None]
    assert not engine.live
