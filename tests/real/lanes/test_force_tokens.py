"""A real engine says what a request tells it to, in its scheduler, beside requests that are left alone."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.tokens.tokenizer import Tokenizer

PROMPT = [1, 4093, 198]
SCRIPTS = [[5, 6, 7, 2], [9, 8, 7, 6, 2]]
END_OF_TURN = 2
TOKENS = 6
VOCAB_SIZE = 49152
SAYING = '<tool_call>\n{"name": "guess", "arguments": {"number": 12}}\n</tool_call><|im_end|>'
MESSAGES = [{"role": "user", "content": "Guess my number."}]


@dataclass(frozen=True)
class Said:
    """What came back."""

    status: int
    ids: list[int]
    logprobs: list[float]
    error: str


@dataclass(frozen=True)
class Engine:
    """A server, asked over its own API."""

    name: str
    http: httpx.AsyncClient

    async def say(self, script: object = None) -> Said:
        """Greedy continuation of the prompt, with `script` as its `force_ids` unless that is None."""
        parameters = {} if script is None else {"force_ids": script}
        path, body = _sglang(parameters) if self.name == "sglang" else _vllm(parameters)
        answer = await self.http.post(path, json=body, timeout=300)
        if answer.status_code != 200:
            return Said(answer.status_code, [], [], answer.text)
        return _sglang_said(answer.json()) if self.name == "sglang" else _vllm_said(answer.json())


def _sglang(parameters: dict[str, object]) -> tuple[str, dict[str, object]]:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "custom_params": parameters}
    return "/generate", {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling}


def _sglang_said(answer: dict[str, Any]) -> Said:
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return Said(200, answer["output_ids"], logprobs, "")


def _vllm(parameters: dict[str, object]) -> tuple[str, dict[str, object]]:
    sampling = {"max_tokens": TOKENS, "temperature": 0, "logprobs": 0, "extra_args": parameters}
    return "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling}


def _vllm_said(answer: dict[str, Any]) -> Said:
    [choice] = answer["choices"]
    return Said(200, choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]], "")


@pytest.fixture(name="sglang")
async def _sglang_engine(sglang_url: str) -> AsyncIterator[Engine]:
    async with httpx.AsyncClient(base_url=sglang_url) as http:
        yield Engine("sglang", http)


@pytest.fixture(name="vllm")
async def _vllm_engine(vllm_url: str) -> AsyncIterator[Engine]:
    async with httpx.AsyncClient(base_url=vllm_url) as http:
        yield Engine("vllm", http)


async def scripted_beside_free(engine: Engine) -> None:
    """Each says its own script to its end-of-turn id; who has none says what it says alone."""
    alone = await engine.say()
    *scripted, free = await asyncio.gather(*(engine.say(script) for script in SCRIPTS), engine.say())

    assert [said.ids for said in scripted] == SCRIPTS
    assert (len(free.ids), free.ids) == (TOKENS, alone.ids)


async def refused_scripts(engine: Engine) -> None:
    """What is no list of ids is answered 400, and the server lives on."""
    answers = [await engine.say(script) for script in ("12", [1, True], [-1])]

    assert [(said.status, "expected a list of token ids" in said.error) for said in answers] == [(400, True)] * 3
    assert (await engine.say(SCRIPTS[0])).ids == SCRIPTS[0]


async def test_sglang_says_scripts_beside_free_requests(sglang: Engine) -> None:
    """In one batch, by a hook alone: the request carries no pickled processor."""
    await scripted_beside_free(sglang)


async def test_vllm_says_scripts_beside_free_requests(vllm: Engine) -> None:
    """In one batch."""
    await scripted_beside_free(vllm)


async def test_sglang_refuses_what_is_no_script(sglang: Engine) -> None:
    """Where a processor that raises would end the scheduler."""
    await refused_scripts(sglang)


async def test_vllm_refuses_what_is_no_script(vllm: Engine) -> None:
    """Where requests are validated."""
    await refused_scripts(vllm)


async def logprobs_of_the_model(engine: Engine) -> None:
    """Forcing what it would have said changes nothing; what it would not have said is unlikely."""
    free = await engine.say()

    assert (await engine.say(free.ids)).logprobs == pytest.approx(free.logprobs, abs=1e-4)
    assert max((await engine.say([5, 6, 7])).logprobs[:3]) < -5


async def test_sglang_reports_the_logprobs_of_the_model(sglang: Engine) -> None:
    """Its own would be taken from what a processor returns; the plugin puts them right."""
    await logprobs_of_the_model(sglang)


async def test_vllm_reports_the_logprobs_of_the_model(vllm: Engine) -> None:
    """It takes them from the logits before any processor."""
    await logprobs_of_the_model(vllm)


async def test_sglang_refuses_an_id_that_nobody_has(sglang: Engine) -> None:
    """It would end the scheduler."""
    said = await sglang.say([VOCAB_SIZE])

    assert (said.status, "out of vocabulary" in said.error) == (400, True)


async def test_vllm_is_on_its_own_at_an_id_that_nobody_has(vllm: Engine) -> None:
    """Its check of parameters does not know the vocabulary."""
    assert (await vllm.say([VOCAB_SIZE])).ids == (await vllm.say()).ids


async def read_by_a_chat_client(engine: Engine, parameter: str, tokenizer: Tokenizer) -> None:
    """Known words over the engine's own chat route, to the end-of-turn id that ends the script."""
    script = tokenizer.encode(SAYING)
    [model] = (await engine.http.get("/v1/models")).raise_for_status().json()["data"]
    body = {"model": model["id"], "messages": MESSAGES, "max_tokens": 100, parameter: {"force_ids": script}}
    answer = (await engine.http.post("/v1/chat/completions", json=body, timeout=300)).raise_for_status().json()

    [choice] = answer["choices"]
    assert choice["message"]["content"].strip() == SAYING.removesuffix("<|im_end|>")
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", len(script))


async def test_a_chat_client_of_sglang_reads_the_script(sglang: Engine, model_dir: Path) -> None:
    """It is handed on as `custom_params`."""
    await read_by_a_chat_client(sglang, "custom_params", Tokenizer.load(model_dir))


async def test_a_chat_client_of_vllm_reads_the_script(vllm: Engine, model_dir: Path) -> None:
    """It is handed on as `vllm_xargs`."""
    await read_by_a_chat_client(vllm, "vllm_xargs", Tokenizer.load(model_dir))
