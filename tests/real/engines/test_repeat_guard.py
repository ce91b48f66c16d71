"""The repeat guard inside real servers: one token, the same on every engine, and nobody else's tokens.

The looping prompt is greedy, in float32; `looped_ids` is what every engine says without a guard.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from harness.engines.base import LogprobScale
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.engines.remote.vllm import VLLMTokenProvider
from harness.errors import ScenarioError
from harness.lab.lanes import INSTALLED, LaneEngine
from harness.sessions.continuation import Endings, Output
from harness.tokens.tokenizer import Tokenizer
from harness.types import FinishReason, GenerationRequest, GenerationResult, SamplingParams, as_ids
from server_patch.repeat_terminate import OBJECT_KEY_TEXT, RepeatTerminateConfig
from tests.looping_prompt import OTHER_PROMPTS, PROMPT_IDS, SERVED_CONFIG, SERVED_STOP_AFTER, looped_ids
from tests.real_engines import on_real

Server = SGLangTokenProvider | VLLMTokenProvider

BUDGET = SERVED_STOP_AFTER + 32
GREEDY = SamplingParams(BUDGET, temperature=0.0, ignore_eos=True)
LATE = SERVED_STOP_AFTER - 16
"""Tokens before a joint that lies shortly before the end."""
EARLY = 20
TURN, CUTS = 120, 3
"""Tokens of a turn that the guard leaves alone, and how often it is cut at most."""

_PROVIDERS = {LaneEngine.SGLANG: SGLangTokenProvider, LaneEngine.VLLM: VLLMTokenProvider}


@pytest.fixture(name="engine", params=[pytest.param(each, marks=on_real(each)) for each in INSTALLED])
def _engine(request: pytest.FixtureRequest) -> LaneEngine:
    return request.param


@pytest.fixture(name="url")
def _url(engine: LaneEngine, request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{engine}_url")
    return url


@pytest.fixture(name="tokenizer")
def _tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(name="server")
async def _server(engine: LaneEngine, url: str, tokenizer: Tokenizer) -> AsyncIterator[Server]:
    async with provider(engine, url, tokenizer, SERVED_CONFIG) as server:
        yield server


def provider(engine: LaneEngine, url: str, tokenizer: Tokenizer, wanted: RepeatTerminateConfig) -> Server:
    """A provider that wants `wanted`; the scale of logprobs is measured elsewhere."""
    scale = LogprobScale.AFTER_TEMPERATURE
    return _PROVIDERS[engine](url, vocab_size=tokenizer.vocab_size, repeat_guard=wanted, logprob_scale=scale)


async def ask(
    server: Server, ids: list[int], params: SamplingParams = GREEDY, *, continues: int = 0
) -> GenerationResult:
    return await server.generate(GenerationRequest(as_ids(ids), params, uuid4().hex, continues=continues))


async def cut(
    server: Server, ids: list[int], params: SamplingParams = GREEDY, *, continues: int = 0
) -> GenerationResult:
    """What a request comes to that is aborted at its first tokens."""
    request_id = uuid4().hex
    async for piece in server.stream(GenerationRequest(as_ids(ids), params, request_id, continues=continues)):
        if isinstance(piece, GenerationResult):
            return piece
        asyncio.get_running_loop().call_soon(asyncio.ensure_future, server.abort(request_id))
    raise AssertionError("the stream ended without a result")


async def ask_late(server: Server) -> GenerationResult:
    """The loop from shortly before its end."""
    return await ask(server, PROMPT_IDS + looped_ids(LATE), continues=LATE)


async def test_a_loop_ends_at_one_token_on_every_engine(server: Server) -> None:
    """The local engine ends the same output by the same formula."""
    result = await ask(server, PROMPT_IDS)

    assert result.finish_reason is FinishReason.REPEAT
    assert result.output_ids.tolist() == looped_ids(SERVED_STOP_AFTER)
    assert (result.forced_tokens, result.matched_stop) == (0, None)


async def test_without_the_guard_the_loop_would_go_on(server: Server) -> None:
    """From the token that it was ended at on, as an output of its own, the engine fills the budget."""
    rest = replace(GREEDY, max_new_tokens=BUDGET - SERVED_STOP_AFTER)
    result = await ask(server, PROMPT_IDS + looped_ids(SERVED_STOP_AFTER), rest)

    assert result.finish_reason is FinishReason.LENGTH
    assert result.output_ids.tolist() == looped_ids(BUDGET)[SERVED_STOP_AFTER:]


async def test_the_others_in_the_batch_do_not_change_by_a_token(server: Server, tokenizer: Tokenizer) -> None:
    """They are sampled beside a sequence that the guard ends, and by themselves."""
    prompts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in OTHER_PROMPTS]
    others = [(tokenizer.encode(text), replace(GREEDY, max_new_tokens=40)) for text in prompts]
    alone = await asyncio.gather(*(ask(server, *other) for other in others))
    offender, *beside = await asyncio.gather(ask_late(server), *(ask(server, *other) for other in others))

    assert offender.finish_reason is FinishReason.REPEAT
    assert [each.output_ids.tolist() for each in beside] == [each.output_ids.tolist() for each in alone]
    assert {each.finish_reason for each in (*alone, *beside)} == {FinishReason.LENGTH}


async def test_a_continuation_after_an_abort_ends_at_the_same_token(server: Server) -> None:
    """The detector knows what was generated before the joint; as a prompt it would count for nothing."""
    ids = PROMPT_IDS + looped_ids(EARLY)
    while (piece := await cut(server, ids, continues=EARLY)).finish_reason is not FinishReason.ABORT:
        assert piece.finish_reason is FinishReason.REPEAT  # its abort came too late
    before = EARLY + piece.output_ids.size
    rest = await ask(server, ids + piece.output_ids.tolist(), continues=before)

    assert (rest.finish_reason, before + rest.output_ids.size) == (FinishReason.REPEAT, SERVED_STOP_AFTER)


async def test_a_turn_that_is_cut_and_goes_on_is_the_uninterrupted_one(server: Server, tokenizer: Tokenizer) -> None:
    """Greedy, under the same weights: token by token, wherever the joints are."""
    params, endings = replace(GREEDY, max_new_tokens=TURN), Endings(tokenizer.eos_ids, tokenizer.decode)
    output = Output.nothing()
    while not output.is_complete:
        send = cut if len(output.segments) < CUTS else ask
        request = output.next_request(as_ids(PROMPT_IDS), params, request_id="")
        result = await send(server, request.input_ids.tolist(), request.params, continues=request.continues)
        if not output.segments and result.finish_reason is FinishReason.LENGTH:
            continue  # its abort came too late
        output = output.join(result).end_as_whole(params, endings)

    *cuts, last = [each.finish_reason for each in output.segments]
    assert ({*cuts}, last) == ({FinishReason.ABORT}, FinishReason.LENGTH)
    assert output.ids.tolist() == looped_ids(TURN)


async def test_object_keys_are_counted_by_the_tokens_of_the_server(
    engine: LaneEngine, url: str, tokenizer: Tokenizer
) -> None:
    """It encodes them with its own tokenizer, once it has loaded it; the last one allowed is said here, by a script."""
    assert SERVED_CONFIG.max_object_keys is not None
    key_ids = tokenizer.encode(OBJECT_KEY_TEXT)
    before = key_ids * (SERVED_CONFIG.max_object_keys - 1)
    scripted = provider(engine, url, tokenizer, SERVED_CONFIG)
    scripted.proves_scripts = True
    request = GenerationRequest(
        as_ids(PROMPT_IDS + before), GREEDY, uuid4().hex, continues=len(before), script_ids=as_ids(key_ids * 2)
    )
    async with scripted as server:
        result = await server.generate(request)

    assert (result.finish_reason, result.output_ids.tolist()) == (FinishReason.REPEAT, key_ids)


async def test_a_server_with_other_limits_is_refused(engine: LaneEngine, url: str, tokenizer: Tokenizer) -> None:
    wanted = replace(SERVED_CONFIG, ngram_repeats=2)
    with pytest.raises(ScenarioError, match=f"other limits .digest {SERVED_CONFIG.digest()[:12]}"):
        async with provider(engine, url, tokenizer, wanted):
            pass


ENDED = {
    LaneEngine.SGLANG: {"finish_reason": "length", "matched_stop": "\0repeat_terminate"},
    LaneEngine.VLLM: {"finish_reason": "repetition", "stop_reason": "repeat_terminate"},
}
"""What a client of the engine's own OpenAI routes sees, as docs/repeat-guard.md has it."""


async def test_a_plain_client_of_the_server_is_guarded_too(engine: LaneEngine, url: str, server: Server) -> None:
    """It asks for nothing, and sees that the answer was cut."""
    continued = {"repeat_prefix_len": LATE}
    extra = {"custom_params": continued} if engine is LaneEngine.SGLANG else {"vllm_xargs": continued}
    body = {"model": server.capabilities.model, "prompt": PROMPT_IDS + looped_ids(LATE), "temperature": 0}
    choice = await completion(url, body | {"max_tokens": 64} | extra)

    assert {key: choice[key] for key in ENDED[engine]} == ENDED[engine]


async def test_sglang_says_of_every_sequence_whether_it_was_ended(sglang_url: str) -> None:
    """0 is no guess: without the guard there is nothing."""
    body = {"input_ids": PROMPT_IDS, "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    async with httpx.AsyncClient() as client:
        answer = (await client.post(f"{sglang_url}/generate", json=body, timeout=60)).raise_for_status().json()

    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3, "repeat_terminate": 0}


async def completion(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The choice of a plain request to `/v1/completions`."""
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/v1/completions", json=body, timeout=120)
    choice: dict[str, Any] = answer.raise_for_status().json()["choices"][0]
    return choice
