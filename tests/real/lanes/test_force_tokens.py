"""A real engine says what a request tells it to, in its scheduler, beside requests that are left alone."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.lab.lanes import INSTALLED, LaneEngine
from harness.tokens.tokenizer import Tokenizer
from tests.real_engines import on_real

PROMPT = [1, 4093, 198]
SCRIPTS = [[5, 6, 7, 2], [9, 8, 7, 6, 2]]
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


@pytest.fixture(name="engine", params=[pytest.param(each, marks=on_real(each)) for each in INSTALLED])
async def _engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    async with httpx.AsyncClient(base_url=request.getfixturevalue(f"{request.param}_url")) as http:
        yield Engine(request.param, http)


async def test_scripts_are_said_beside_free_requests(engine: Engine) -> None:
    """In one batch: each says its own script to its end-of-turn id; who has none says what it says alone."""
    alone = await engine.say()
    *scripted, free = await asyncio.gather(*(engine.say(script) for script in SCRIPTS), engine.say())

    assert [said.ids for said in scripted] == SCRIPTS
    assert (len(free.ids), free.ids) == (TOKENS, alone.ids)


async def test_what_is_no_script_is_refused(engine: Engine) -> None:
    """What is no list of ids is answered 400, and the server lives on."""
    answers = [await engine.say(script) for script in ("12", [1, True], [-1])]

    assert [(said.status, "expected a list of token ids" in said.error) for said in answers] == [(400, True)] * 3
    assert (await engine.say(SCRIPTS[0])).ids == SCRIPTS[0]


async def test_logprobs_are_those_of_the_model(engine: Engine) -> None:
    """Forcing what it would have said changes nothing; what it would not have said is unlikely."""
    free = await engine.say()

    assert (await engine.say(free.ids)).logprobs == pytest.approx(free.logprobs, abs=1e-4)
    assert max((await engine.say([5, 6, 7])).logprobs[:3]) < -5


async def test_an_id_that_nobody_has(engine: Engine) -> None:
    """It would end the scheduler of SGLang; the check of vLLM does not know the vocabulary, and vLLM passes over it."""
    said = await engine.say([VOCAB_SIZE])

    if engine.name == LaneEngine.SGLANG:
        assert (said.status, "out of vocabulary" in said.error) == (400, True)
    else:
        assert said.ids == (await engine.say()).ids


async def test_a_chat_client_reads_the_script(engine: Engine, model_dir: Path) -> None:
    """Known words over the engine's own chat route, to the end-of-turn id that ends the script."""
    script = Tokenizer.load(model_dir).encode(SAYING)
    parameter = "custom_params" if engine.name == LaneEngine.SGLANG else "vllm_xargs"
    [model] = (await engine.http.get("/v1/models")).raise_for_status().json()["data"]
    body = {"model": model["id"], "messages": MESSAGES, "max_tokens": 100, parameter: {"force_ids": script}}
    answer = (await engine.http.post("/v1/chat/completions", json=body, timeout=300)).raise_for_status().json()

    [choice] = answer["choices"]
    assert choice["message"]["content"].strip() == SAYING.removesuffix("<|im_end|>")
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", len(script))
