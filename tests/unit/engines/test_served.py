"""An engine of this process behind SGLang's native wire: what a client may say, and what it is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.engines.base import LogprobScale, TokenProvider
from harness.engines.examine.doctor import diagnose
from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.engines.sglang_server import NativeServer, serve_in_process
from harness.errors import EngineError, HarnessError, ScenarioError
from harness.machine.findings import Level
from harness.tokens.tokenizer import Tokenizer
from harness.types import FinishReason, GenerationRequest, SamplingParams, as_ids
from server_patch.repeat_terminate import RepeatTerminateConfig
from tests.fake_engines.providers import SLOWLY, scripted_engine, toy_tokenizer

GUARD = RepeatTerminateConfig(enabled=True, max_consecutive_token_repeats=8, min_new_tokens=8)
PROMPT = toy_tokenizer().encode("Say something, please.")
DEADLINE_S = 30


@asynccontextmanager
async def client_of(engine: TokenProvider) -> AsyncIterator[httpx.AsyncClient]:
    """A plain client of `engine`, served."""
    app = NativeServer(engine, toy_tokenizer(), Path("/weights/first")).app()
    async with (
        engine,
        serve_in_process(app) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=DEADLINE_S) as client,
    ):
        yield client


def message_of(answer: httpx.Response) -> str:
    """What a refusal says."""
    message: str = answer.json()["error"]["message"]
    return message


async def until(engine: TokenProvider, *, busy: bool) -> None:
    """Return once something is being sampled, or nothing any more."""
    async with asyncio.timeout(DEADLINE_S):
        while bool((await engine.health()).running) != busy:
            await asyncio.sleep(0.01)


async def test_a_plain_client_gets_what_it_asks_for_and_no_more():
    """No logprobs unless they are wanted; ids and the reason of the end in any case."""
    async with client_of(scripted_engine(ScriptStep(text="Yes."))) as client:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}, "something_unknown": 1}
        answer = (await client.post("/generate", json=body)).raise_for_status().json()

    meta = answer["meta_info"]
    assert answer["output_ids"] == toy_tokenizer().encode("Yes")
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 3)
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    assert not [key for key in meta if key.endswith("logprobs")]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "missing required field `input_ids`"),
    ({"input_ids": "text"}, "Expected `array`, got `str` - at `$.input_ids`"),
    ({"input_ids": [[1, 2], [3]]}, "Expected `int`, got `array` - at `$.input_ids[0]`"),
    ({"input_ids": [-1]}, "Expected `int` >= 0 - at `$.input_ids[0]`"),
    ({"input_ids": [1], "text": "Hello"}, "Expected `null`, got `str` - at `$.text`"),
    ({"input_ids": [1], "lora_path": "adapter"}, "got `str` - at `$.lora_path`"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": "3"}}, "at `$.sampling_params.max_new_tokens`"),
    ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "unknown field `regex` - at `$.sampling_params`"),
    ({"input_ids": [1], "sampling_params": {"n": 2}}, "n: this server can only do 1, got 2"),
    (
        {"input_ids": [1], "sampling_params": {"repetition_penalty": 1.2}},
        "repetition_penalty: this server can only do 1, got 1.2",
    ),
    ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len: expected -1..0, got 1"),
    ({"input_ids": [10**6]}, "token id 1000000 is outside the vocabulary"),
    ({"input_ids": []}, "at least one input id"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
async def test_a_request_that_cannot_be_served_is_refused(body: dict[str, Any], message: str):
    """The message names the field, what was expected there and what came; nothing is sampled."""
    engine = scripted_engine()
    async with client_of(engine) as client:
        answer = await client.post("/generate", json=body)

        assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)
        assert message in message_of(answer)
        assert not (await engine.health()).running


async def test_a_body_that_is_no_json_is_refused():
    async with client_of(scripted_engine()) as client:
        for path in ("/generate", "/abort_request", "/pause_generation", "/update_weights_from_disk", "/tokenize"):
            answer = await client.post(path, content=b"{")
            assert (answer.status_code, "invalid request body" in message_of(answer)) == (400, True)
        wrong = await client.post("/pause_generation", json={"mode": "gently"})

        assert "at `$.mode`" in message_of(wrong)


async def test_a_refusal_within_a_stream_is_an_event():
    """The status has gone out already, as with SGLang."""
    async with client_of(scripted_engine()) as client:
        answer = await client.post("/generate", json={"input_ids": [10**6], "stream": True})

    first, last = answer.text.strip().split("\n\n")
    assert (answer.status_code, last) == (200, "data: [DONE]")
    assert json.loads(first.removeprefix("data: "))["error"]["code"] == 400


async def test_a_failure_of_the_engine_is_no_fault_of_the_request():
    """It is answered 500, and the provider of a client calls it an engine error."""
    engine = ScriptedEngine(toy_tokenizer(), Script((ScriptStep(text="Oh.", fault=ScriptedFault.DISCONNECT),)))
    async with client_of(engine) as client:
        answer = await client.post("/generate", json={"input_ids": PROMPT})

        assert answer.status_code == 500
        url, size = str(client.base_url), toy_tokenizer().vocab_size
        async with SGLangTokenProvider(url, vocab_size=size, logprob_scale=LogprobScale.AFTER_TEMPERATURE) as provider:
            with pytest.raises(EngineError, match="broke after 0 tokens") as caught:
                await provider.generate(GenerationRequest(as_ids(PROMPT), SamplingParams(4), request_id="a" * 32))
    assert type(caught.value) is EngineError


@asynccontextmanager
async def provider_of(client: httpx.AsyncClient, guard: RepeatTerminateConfig) -> AsyncIterator[SGLangTokenProvider]:
    """The provider for the server that `client` talks to, which must run `guard`."""
    url, size = str(client.base_url), toy_tokenizer().vocab_size
    async with SGLangTokenProvider(url, vocab_size=size, repeat_guard=guard) as provider:
        yield provider


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("paused", [True, False], ids=["paused", "sampling"])
async def test_a_client_that_leaves_takes_its_generation_along(stream: bool, paused: bool):
    """Nothing is sampled for nobody, although nobody sends an abort."""
    engine = scripted_engine(SLOWLY)
    async with client_of(engine) as client:
        body = {"input_ids": PROMPT, "stream": stream, "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
        asking = asyncio.ensure_future(client.post("/generate", json=body))
        await until(engine, busy=True)
        if paused:
            await client.post("/pause_generation", json={"mode": "retract"})
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

        await until(engine, busy=False)


async def test_the_verbs_of_a_paused_server():
    """A paused one is healthy and not ready; what arrives waits and can be aborted."""
    engine = scripted_engine(SLOWLY)
    async with client_of(engine) as client:
        await client.post("/pause_generation", json={})
        states = [(await client.get(path)).status_code for path in ("/health", "/ready")]
        waiting = asyncio.ensure_future(client.post("/generate", json={"rid": "b" * 32, "input_ids": PROMPT}))
        await until(engine, busy=True)
        await client.post("/abort_request", json={"rid": "no such request"})
        await client.post("/abort_request", json={})
        assert not waiting.done()
        await client.post("/abort_request", json={"rid": "b" * 32})
        meta = (await waiting).json()["meta_info"]
        await client.post("/continue_generation", json={})

        assert (states, meta["finish_reason"]["type"], meta["completion_tokens"]) == ([200, 503], "abort", 0)
        assert (await client.get("/ready")).status_code == 200


async def test_an_update_changes_where_the_weights_are_said_to_be():
    """And the label, when one is given; a refused one changes neither."""
    async with client_of(scripted_engine()) as client:
        renamed = await client.post("/update_weights_from_disk", json={"model_path": "/w/2", "weight_version": "7"})
        kept = await client.post("/update_weights_from_disk", json={"model_path": "/w/3"})
        refused = await client.post(
            "/update_weights_from_disk", json={"model_path": "/w", "weight_version": "updating-9"}
        )
        info = (await client.get("/model_info")).json()

    assert [answer.json()["success"] for answer in (renamed, kept, refused)] == [True, True, False]
    assert refused.status_code >= 400
    assert (info["model_path"], info["weight_version"], info["served_model_name"]) == ("/w/3", "7", "scripted")


async def test_the_guard_of_the_engine_is_proven_and_marks_every_reply():
    """A provider that wants it finds it, one that wants another does not; an output that repeats itself ends."""
    looping = Script((ScriptStep(text="n" * 200),))
    engine = ScriptedEngine(toy_tokenizer(), looping, context_length=4096, repeat_guard=GUARD)
    async with client_of(engine) as client:
        async with provider_of(client, GUARD) as provider:
            result = await provider.generate(
                GenerationRequest(as_ids(PROMPT), SamplingParams(100), request_id="c" * 32)
            )
            assert provider.capabilities.repeat_guard == GUARD.digest()
        with pytest.raises(ScenarioError, match="runs one with other limits"):
            async with provider_of(client, replace(GUARD, max_consecutive_token_repeats=9)):
                pass

    assert (result.finish_reason, result.output_ids.size < 100) == (FinishReason.REPEAT, True)


async def test_the_doctor_says_what_really_samples():
    """The engine is the one behind the protocol, and the evidence is that of a real server."""
    async with client_of(scripted_engine(SLOWLY)) as client:
        diagnosis = await diagnose(str(client.base_url), tokenizer=toy_tokenizer())
    levels = {finding.check: finding.level for finding in diagnosis.findings}

    assert (diagnosis.engine, diagnosis.protocol, diagnosis.is_usable) == ("scripted", "sglang", True)
    assert {name for name, level in levels.items() if level is not Level.OK} == {"repeat guard", "vocabulary"}


async def test_a_port_that_is_taken_is_said():
    app = NativeServer(scripted_engine(), toy_tokenizer(), Path("/weights/first")).app()
    async with serve_in_process(app) as url:
        with pytest.raises(HarnessError, match="cannot listen on"):
            async with serve_in_process(app, port=int(url.rpartition(":")[2])):
                pass


@pytest.mark.model
async def test_the_cache_is_flushed_unless_requests_run(small_dir: Path):
    """A flushed prefix is computed again; while something runs, the cache stays and the answer says so."""
    async with (
        HuggingFaceTokenProvider(small_dir) as engine,
        serve_in_process(NativeServer(engine, Tokenizer.load(small_dir), small_dir).app()) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=DEADLINE_S) as client,
    ):

        async def cached() -> int:
            body = {"input_ids": list(range(3, 103)), "sampling_params": {"max_new_tokens": 1}}
            return int((await client.post("/generate", json=body)).json()["meta_info"]["cached_tokens"])

        first, again = await cached(), await cached()
        flushed = await client.post("/flush_cache")
        after = await cached()
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}
        running = asyncio.ensure_future(client.post("/generate", json={**body, "rid": "d" * 32}))
        await until(engine, busy=True)
        refused = await client.get("/flush_cache")
        await client.post("/pause_generation", json={"mode": "retract"})
        paused = await client.post("/flush_cache")
        await client.post("/continue_generation", json={})
        await client.post("/abort_request", json={"abort_all": True})
        result = (await running).json()

    assert (first, again > 90, after) == (0, True, 0)
    assert [answer.status_code for answer in (flushed, refused, paused)] == [200, 400, 200]
    assert result["meta_info"]["finish_reason"]["type"] == "abort"


async def test_force_ids_are_said() -> None:
    """As the SGLang of a lane does; what is no list of ids is refused by name."""
    sampling = {"max_new_tokens": 4, "custom_params": {"force_ids": [7, 8, 9, 2]}}
    async with client_of(scripted_engine()) as client:
        said = await client.post("/generate", json={"input_ids": PROMPT, "sampling_params": sampling})
        wrong = {"custom_params": {"force_ids": "7"}}
        refused = await client.post("/generate", json={"input_ids": PROMPT, "sampling_params": wrong})

    assert said.json()["output_ids"] == [7, 8, 9, 2]
    assert (refused.status_code, "force_ids: expected a list" in message_of(refused)) == (400, True)
