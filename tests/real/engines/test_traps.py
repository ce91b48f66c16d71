"""What real engines do to those who take them by their word, and that it does not happen to a session of ours.

Each test shows the trap on the server itself, by plain HTTP, and then that a provider does not fall into it. One that
fails on its first half says that an engine has changed: the precaution may have become needless.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
import pytest_asyncio

from harness.engines.base import PauseMode, TokenProvider
from harness.engines.remote.reply import Asked
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.engines.remote.sglang_wire import generate_body
from harness.engines.remote.vllm import VLLMTokenProvider
from harness.engines.remote.vllm_wire import CompletionsApi, GenerateApi
from harness.errors import EngineRejected
from harness.tokens.tokenizer import Tokenizer
from harness.types import FinishReason, GenerationRequest, GenerationResult, SamplingParams, TokenIds, as_ids
from tests.real_engines import SLOTS

DEADLINE_S = 300
SHORT = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
LONG = replace(SHORT, max_new_tokens=3000, temperature=1.0)
"""Ends when it is aborted, however late that comes."""


@pytest.fixture(scope="session", name="tokenizer")
def _tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="session", name="prompt")
def _prompt(tokenizer: Tokenizer) -> TokenIds:
    return as_ids(tokenizer.encode("<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n"))


@pytest_asyncio.fixture(name="sglang")
async def _sglang(sglang_url: str, tokenizer: Tokenizer) -> AsyncIterator[SGLangTokenProvider]:
    async with SGLangTokenProvider(sglang_url, vocab_size=tokenizer.vocab_size) as provider:
        yield provider


@pytest_asyncio.fixture(name="vllm")
async def _vllm(vllm_url: str, tokenizer: Tokenizer) -> AsyncIterator[VLLMTokenProvider]:
    async with VLLMTokenProvider(vllm_url, vocab_size=tokenizer.vocab_size) as provider:
        yield provider


@asynccontextmanager
async def plain_http(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """The server without anything of ours in between."""
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(url, timeout=timeout, trust_env=False) as http:
        yield http


async def answer(http: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
    """The decoded content of a successful answer, None when it has none."""
    async with http.request(method, path, json=body) as response:
        assert response.status == 200, await response.text()
        content = await response.read()
        return await response.json() if content else None


async def generates(provider: TokenProvider, prompt: TokenIds, params: SamplingParams = SHORT) -> GenerationResult:
    """A whole generation under a fresh id."""
    async with asyncio.timeout(DEADLINE_S):
        return await provider.generate(GenerationRequest(prompt, params, request_id=uuid4().hex))


async def begun(
    provider: TokenProvider, prompt: TokenIds, params: SamplingParams, request_id: str
) -> asyncio.Task[GenerationResult]:
    """A generation whose first tokens have come."""
    has_begun = asyncio.Event()

    async def generate() -> GenerationResult:
        async for piece in provider.stream(GenerationRequest(prompt, params, request_id)):
            has_begun.set()
            if isinstance(piece, GenerationResult):
                return piece
        raise AssertionError("a stream ends with a result")

    running = asyncio.create_task(generate())
    async with asyncio.timeout(DEADLINE_S):
        await has_begun.wait()
    return running


async def runs(provider: TokenProvider, requests: int) -> None:
    """The engine works on so many requests."""
    async with asyncio.timeout(DEADLINE_S):
        while (await provider.health()).running != requests:
            await asyncio.sleep(0.02)


def plain_sglang(prompt: TokenIds, rid: str, tokens: int = LONG.max_new_tokens) -> dict[str, Any]:
    """The body of a generation, a long one."""
    sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return {"rid": rid, "input_ids": prompt.tolist(), "sampling_params": sampling}


def plain_vllm(prompt: TokenIds, request_id: str, tokens: int = LONG.max_new_tokens) -> dict[str, Any]:
    """The body of a generation, a long one."""
    sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return {"request_id": request_id, "token_ids": prompt.tolist(), "sampling_params": sampling}


async def test_sglang_aborts_every_id_that_begins_alike(sglang: SGLangTokenProvider, sglang_url: str, prompt: TokenIds):
    """`ab-1` takes `ab-10` with it; ids of one length cannot be the beginning of each other."""
    async with plain_http(sglang_url) as http:
        named = [
            asyncio.ensure_future(answer(http, "POST", "/generate", plain_sglang(prompt, rid)))
            for rid in ("ab-1", "ab-10")
        ]
        await runs(sglang, 2)
        await answer(http, "POST", "/abort_request", {"rid": "ab-1"})
        replies = await asyncio.gather(*named)
    assert [reply["meta_info"]["finish_reason"]["type"] for reply in replies] == ["abort", "abort"]

    stem = uuid4().hex[:-1]
    first = await begun(sglang, prompt, LONG, stem + "0")
    second = await begun(sglang, prompt, replace(LONG, max_new_tokens=60), stem + "a")
    assert await sglang.abort(stem + "0") == 1
    assert (await first).finish_reason is FinishReason.ABORT
    assert (await second).finish_reason is FinishReason.LENGTH


async def test_an_id_outside_the_vocabulary_never_reaches_sglang(
    sglang: SGLangTokenProvider, prompt: TokenIds, tokenizer: Tokenizer
):
    """It would end the server: an index error in its scheduler. This is the first id that is not one."""
    ids = as_ids([*prompt, tokenizer.vocab_size])
    with pytest.raises(EngineRejected, match="outside the vocabulary"):
        await generates(sglang, ids)
    with pytest.raises(EngineRejected, match="outside the vocabulary"):
        await sglang.score(ids, start=1)

    assert (await generates(sglang, prompt)).output_ids.size == 4


async def test_vllm_refuses_an_id_outside_the_vocabulary_itself(
    vllm: VLLMTokenProvider, vllm_url: str, prompt: TokenIds
):
    async with plain_http(vllm_url) as http:
        body = plain_vllm(as_ids([*prompt, 10**6]), uuid4().hex)
        async with http.post("/inference/v1/generate", json=body) as response:
            assert (response.status, "out of vocabulary" in await response.text()) == (400, True)

    with pytest.raises(EngineRejected, match="outside the vocabulary"):
        await generates(vllm, as_ids([*prompt, 10**6]))


async def test_a_paused_sglang_looks_dead_to_its_health_check(sglang: SGLangTokenProvider, sglang_url: str):
    """`/health` generates a token, which waits for the end of the pause; the provider asks what does not wait."""
    await sglang.pause(PauseMode.ABORT)
    try:
        async with plain_http(sglang_url) as http:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(answer(http, "GET", "/health"), 5)
        health = await sglang.health()
    finally:
        await sglang.resume()

    assert (health.ready, health.paused) == (True, True)


async def test_a_paused_vllm_is_healthy(vllm: VLLMTokenProvider, vllm_url: str):
    """Its `/health` does not tell a pause from work; `/is_paused` does, whoever paused it."""
    async with plain_http(vllm_url) as http:
        await answer(http, "POST", "/pause?mode=abort")
        try:
            await answer(http, "GET", "/health")
            health = await vllm.health()
        finally:
            await answer(http, "POST", "/resume")

    assert (health.ready, health.paused) == (True, True)


async def test_vllm_says_that_it_aborted_and_goes_on(vllm: VLLMTokenProvider, vllm_url: str, prompt: TokenIds):
    """The id that the request was sent with is not the one it has inside; the provider knows both."""
    request_id = uuid4().hex
    async with plain_http(vllm_url) as http:
        long = asyncio.ensure_future(answer(http, "POST", "/inference/v1/generate", plain_vllm(prompt, request_id)))
        await runs(vllm, 1)
        told = await answer(http, "POST", "/abort_requests", {"request_ids": [request_id]})
        # Served after the abort, in one batch with the request that should be gone.
        await generates(vllm, prompt)
        went_on = not long.done() and (await vllm.health()).running == 1
        await answer(http, "POST", "/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]})
        reply = await long
    assert (told["aborted"], went_on) == (1, True)
    assert reply["choices"][0]["finish_reason"] == "abort"

    request_id = uuid4().hex
    ours = await begun(vllm, prompt, LONG, request_id)
    assert await vllm.abort(request_id) == 1
    assert (await ours).finish_reason is FinishReason.ABORT


async def test_sglang_has_another_name_after_an_update_from_disk(
    sglang: SGLangTokenProvider, sglang_url: str, prompt: TokenIds, model_dir: Path, perturbed_dir: Path
):
    """Its model is then called like the folder, and requests for the old name are refused; the provider names none."""
    before = await generates(sglang, prompt)
    async with plain_http(sglang_url) as http:
        await sglang.update_weights(perturbed_dir, "900")
        try:
            models = await answer(http, "GET", "/v1/models")
            during = await generates(sglang, prompt)
            async with SGLangTokenProvider(sglang_url, vocab_size=sglang.capabilities.vocab_size) as late:
                late_version = (await generates(late, prompt)).version_spans[0].version
        finally:
            await sglang.update_weights(model_dir, "901")
    after = await generates(sglang, prompt)

    assert models["data"][0]["id"] == str(perturbed_dir)
    assert ([span.version for span in during.version_spans], late_version) == (["900"], "900")
    assert after.output_ids.tolist() == before.output_ids.tolist()


async def served_order(
    provider: TokenProvider, prompt: TokenIds, ask: Callable[[int], Awaitable[Any]], sent: list[int]
) -> list[int]:
    """The order in which an engine without a free slot serves requests of the priorities `sent`; `ask` sends one.

    One slot becomes free once they all wait, the others when they are served.
    """
    served = []

    async def wait_for_a_slot(priority: int) -> None:
        await ask(priority)
        served.append(priority)

    long = replace(LONG, max_new_tokens=1000)  # all of them fit into the cache
    first, *others = [await begun(provider, prompt, long, uuid4().hex) for _ in range(SLOTS)]
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(wait_for_a_slot(priority)) for priority in sent]
        while (await provider.health()).waiting < len(sent):
            await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.wait(waiting)
    for each in others:
        each.cancel()
    await asyncio.wait([first, *others])
    return served


async def test_sglang_serves_the_high_priority_first(sglang: SGLangTokenProvider, sglang_url: str, prompt: TokenIds):
    async with plain_http(sglang_url) as http:

        async def ask(priority: int) -> None:
            body = plain_sglang(prompt, uuid4().hex, tokens=1) | {"priority": priority}
            await answer(http, "POST", "/generate", body)

        assert await served_order(sglang, prompt, ask, sent=[0, 5]) == [5, 0]


async def test_vllm_serves_the_low_priority_first(vllm: VLLMTokenProvider, vllm_url: str, prompt: TokenIds):
    async with plain_http(vllm_url) as http:

        async def ask(priority: int) -> None:
            body = plain_vllm(prompt, uuid4().hex, tokens=1) | {"priority": priority}
            await answer(http, "POST", "/inference/v1/generate", body)

        assert await served_order(vllm, prompt, ask, sent=[5, 0]) == [0, 5]


def test_no_request_carries_a_priority(prompt: TokenIds):
    asked = Asked("x", GenerationRequest(prompt, SHORT, uuid4().hex), vocab_size=50_000)
    bodies = [
        generate_body(asked, interval=1),
        *(api.body(asked, "m", interval=1) for api in (GenerateApi(), CompletionsApi())),
    ]

    assert not [body for body in bodies if b"priority" in b"".join(body)]
