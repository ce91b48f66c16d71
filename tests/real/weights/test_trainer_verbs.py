"""Five updates inside one turn on real SGLang, by a trainer that knows no sessions, held against every checkpoint."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from harness.gateway.router.gateway_program import GatewayProgram
from harness.gateway.router.routed import RouterSettings, open_routed
from harness.lab.models.perturb import perturb_checkpoint
from harness.server.serving import serve
from harness.server.store.memory import MemoryStore
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Json
from tests.builders import user
from tests.ground_truth import compare

DEADLINE_S = 600
UPDATES = 5
SESSIONS = 3
TOLERANCE = 1e-3
NOISE = 0.1
STORY = {"model": "m", "max_tokens": 250, "temperature": 0.7}


async def test_five_updates_inside_one_turn_lose_nothing(
    sglang_url: str, smg: GatewayProgram, model_dir: Path, tmp_path: Path
):
    """Pause, flush, weights, continue, as trainers do: one turn, and every token that met its next version says how."""
    moved = perturb_checkpoint(model_dir, tmp_path / "moved", number=1, noise=NOISE)
    chat_tokenizer = open_chat_tokenizer(model_dir)
    settings = RouterSettings(worker_urls=(sglang_url,))
    async with (
        httpx.AsyncClient(base_url=sglang_url, timeout=DEADLINE_S) as worker,
        open_routed(settings, smg, vocab_size=chat_tokenizer.tokenizer.vocab_size) as routed,
        AsyncExitStack() as afterwards,
    ):
        found = (await worker.get("/model_info")).json()["weight_version"]
        first = int(found) + 1 if found.isdecimal() else 0
        checkpoints = {first + n: (model_dir, moved)[n % 2] for n in range(UPDATES + 1)}
        await update(worker, model_dir, first)
        afterwards.push_async_callback(update, worker, model_dir, first + UPDATES + 1)  # others use this server, too
        async with (
            serve(routed.pool, chat_tokenizer, MemoryStore(), around=routed.around) as running,
            httpx.AsyncClient(base_url=running.url, timeout=DEADLINE_S) as http,
        ):
            created = [(await http.post("/sessions", json={"sampling": {"seed": n}})).json() for n in range(SESSIONS)]
            ids = [each["session_id"] for each in created]
            asking = [asyncio.create_task(tell_a_story(http, session_id)) for session_id in ids]
            for version in list(checkpoints)[1:]:
                await sample_more(worker, asking)
                await update(http, checkpoints[version], version)
            answers = await asyncio.gather(*asking)
            turns = [(await http.get(f"/sessions/{each}")).json()["turns"] for each in ids]
            samples = [(await http.get(f"/sessions/{each}/samples")).json()["samples"] for each in ids]
    verdict = await asyncio.to_thread(compare, [sample for [sample] in samples], checkpoints)
    print("\n".join(verdict.lines()))

    assert [answer.status_code for answer in answers] == [200] * SESSIONS
    assert [len(each) for each in turns] == [1] * SESSIONS
    assert max(len(turn["segments"]) for [turn] in turns) == UPDATES + 1
    assert verdict.third_states == []
    assert verdict.behavior_difference < TOLERANCE
    assert verdict.proximal_difference < TOLERANCE
    assert verdict.moved > 10 * TOLERANCE
    for [turn], [sample] in zip(turns, samples, strict=True):
        newest = max(int(span["version"]) for span in turn["weight_versions"])
        waiting = zip(sample["behavior_versions"], sample["proximal_versions"], strict=True)
        assert all(proximal == behavior + 1 for behavior, proximal in waiting if 0 <= behavior < newest)


async def tell_a_story(http: httpx.AsyncClient, session_id: str) -> httpx.Response:
    """One long turn."""
    body: Json = {**STORY, "messages": [user("Tell a long story about a lighthouse and a storm.")]}
    return await http.post(f"/sessions/{session_id}/v1/chat/completions", json=body)


async def sample_more(worker: httpx.AsyncClient, asking: list[asyncio.Task[httpx.Response]]) -> None:
    """Return when stories have gone on for a while, or all of them have ended."""
    async with asyncio.timeout(DEADLINE_S):
        while not all(task.done() for task in asking):
            if any(load["num_running_reqs"] for load in (await worker.get("/v1/loads")).json()["loads"]):
                await asyncio.sleep(0.2)  # a few tokens: a fast engine must not come to the end of its story
                return
            await asyncio.sleep(0.05)


async def update(trainer: httpx.AsyncClient, weights: Path, version: int) -> None:
    """The verbs of one weight update."""
    new = {"model_path": str(weights), "weight_version": str(version)}
    for verb, body in (
        ("/pause_generation", {"mode": "abort"}),
        ("/flush_cache", {}),
        ("/update_weights_from_disk", new),
        ("/continue_generation", {}),
    ):
        answer = await trainer.post(verb, json=body)
        assert answer.status_code == 200, (verb, answer.text)
