"""Sampling masks of engine servers: found at connect, asked for with a bound, read whole and in pieces."""

import json
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from harness.engines.base import LogprobScale
from harness.engines.recorded_rows import check_masks
from harness.engines.remote.reply import Asked
from harness.engines.remote.vllm_messages import GenerateChunk
from harness.engines.remote.vllm_wire import GenerateApi, StreamedPieces, read_piece
from harness.engines.scripted import scripted_masks
from harness.errors import EngineRejected, EngineReplyInvalid
from harness.types import GenerationRequest, GenerationResult, SamplingParams, as_ids
from tests.fake_engines.fake_server import FakeServer, serving
from tests.fake_engines.providers import fake_provider, make_fake, scripted_engine, served, toy_tokenizer

KINDS = ("sglang", "sglang-incremental", "vllm")
PROMPT = as_ids([40, 41, 42])


@asynccontextmanager
async def connected(kind: str, **fields: Any):
    """A fake server with masks and a provider for it; `fields` are set before the provider connects."""
    fake: FakeServer = make_fake(kind, scripted_engine())
    fake.returns_masks = kind == "vllm"
    for name, value in fields.items():
        setattr(fake, name, value)
    async with serving(fake, notices_disconnects=True), fake_provider(fake) as provider:
        yield fake, provider


def request(number: int, *, streams: bool = False, **params: Any) -> GenerationRequest:
    sampling, heard = SamplingParams(6, sampling_mask=True, **params), (lambda delta: None) if streams else None
    return GenerationRequest(PROMPT, sampling, f"{number:032x}", on_delta=heard)


def lists_of(result: GenerationResult) -> list[list[int]]:
    assert result.masks is not None
    return [mask.tolist() for mask in np.split(result.masks.values, result.masks.offsets[1:-1])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streams", [False, True])
async def test_masks_are_those_of_the_engine(kind: str, streams: bool) -> None:
    """One for each output token; SGLang's logprobs are those over them."""
    async with connected(kind) as (_, provider):
        able = provider.capabilities
        asked = request(1, streams=streams, top_p=0.9)
        result = check_masks(able.engine, able.vocab_size, able.max_mask_ids, asked, await provider.generate(asked))

    true = scripted_masks(result.output_ids, PROMPT.size, "0", able.vocab_size)
    assert lists_of(result) == [mask.tolist() for mask in true]
    if kind != "vllm":
        assert result.logprobs.tolist() == [-0.125] * 6


@pytest.mark.parametrize("kind", KINDS)
async def test_masks_are_bounded_and_nothing_is_asked_for_without_them(kind: str) -> None:
    """An engine takes no request for masks without `top_k`; other requests keep every token."""
    async with connected(kind) as (fake, provider):
        await provider.generate(request(1, top_p=0.9))
        bounded = fake.bodies[-1]["sampling_params"]["top_k"]
        await provider.generate(request(2, top_k=7))
        stated = fake.bodies[-1]["sampling_params"]["top_k"]
        result = await provider.generate(GenerationRequest(PROMPT, SamplingParams(6, top_p=0.9), f"{3:032x}"))

    assert (bounded, stated) == (4096, 7)
    assert result.masks is None
    assert fake.bodies[-1]["sampling_params"]["top_k"] == (provider._vocab_size if kind == "vllm" else -1)
    assert "sampling_mask" not in json.dumps(fake.bodies[-1])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_without_masks_is_found_at_connect(kind: str) -> None:
    """Who asks for some is refused before anything is sampled."""
    async with connected(kind, most_candidates=0, returns_masks=False) as (fake, provider):
        assert provider.capabilities.max_mask_ids == 0
        sent = len(fake.bodies)
        with pytest.raises(EngineRejected, match="returns no sampling masks"):
            await provider.generate(request(1, top_p=0.9))
        assert len(fake.bodies) == sent


async def test_vllm_with_masks_has_no_raw_logprobs_and_takes_no_greedy_request() -> None:
    """It requires processed logprobs, so its scale is known; a greedy request is one with a single candidate."""
    async with connected("vllm") as (fake, provider):
        assert provider.capabilities.logprob_scale is LogprobScale.AFTER_TEMPERATURE
        await provider.generate(GenerationRequest(PROMPT, SamplingParams(2, temperature=0.0), f"{1:032x}"))
        scored = await provider.score(PROMPT, start=1)

    assert {name: fake.bodies[-2]["sampling_params"][name] for name in ("top_k", "temperature")} == {
        "top_k": 1,
        "temperature": 1.0,
    }
    assert scored.logprobs.size == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_script_has_its_tokens_for_candidates(kind: str) -> None:
    """The server is not asked: SGLang refuses both together."""
    asked = GenerationRequest(
        PROMPT, SamplingParams(2, top_p=0.9, sampling_mask=True), f"{1:032x}", script_ids=as_ids([70, 71])
    )
    fake = make_fake(kind, scripted_engine(), obeys=True)
    fake.returns_masks = kind == "vllm"
    async with serving(fake, notices_disconnects=True):
        provider = fake_provider(fake)
        provider.proves_scripts = True
        async with provider:
            result = await provider.generate(asked)

    assert lists_of(result) == [[70], [71]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda masks: masks[:-1], "5 sampling masks"),
        (lambda masks: [[1] for _ in masks], "0 of its token"),
        (lambda masks: [*masks[:-1], [*masks[-1], 400]], r"expected 0\.\.258"),
        (lambda masks: [*masks[:-1], masks[-1] * 5000], "expected at most 4096"),
    ],
    ids=["a token too few", "without its token", "beyond the vocabulary", "beyond the bound"],
)
async def test_wrong_masks_are_refused(change: Any, message: str) -> None:
    """With what came and what was expected."""
    async with connected("vllm") as (fake, provider):
        fake.change_masks = change
        able, asked = provider.capabilities, request(1, top_p=0.9)
        with pytest.raises(EngineReplyInvalid, match=message):
            check_masks(able.engine, able.vocab_size, able.max_mask_ids, asked, await provider.generate(asked))


@pytest.mark.parametrize("count", [5, 7])
async def test_masks_without_logprobs_over_them_are_refused(count: int) -> None:
    """Raw logprobs beside masks would be of another distribution."""
    async with connected("sglang", over_masks=count) as (_, provider):
        with pytest.raises(EngineReplyInvalid, match="over sampling masks for 6 output tokens"):
            await provider.generate(request(1, top_p=0.9))


VLLM_CHUNKS = [
    """{"request_id": "generate-tokens-%s", "choices": [{"index": 0, "logprobs":
    {"content": [{"token_id": 70, "logprob": -0.5}]}, "finish_reason": null, "stop_reason": null, "token_ids": [70],
    "routed_experts": null, "sampling_mask": [[70, 9]], "weight_versions": null}]}""",
    """{"request_id": "generate-tokens-%s", "choices": [{"index": 0, "logprobs":
    {"content": [{"token_id": 71, "logprob": -0.0}]}, "finish_reason": "length", "stop_reason": null, "token_ids": [71],
    "routed_experts": null, "sampling_mask": [[71]], "weight_versions": [{"version": "0", "start": 0, "end": 2}]}]}""",
]
"""As the response models of vLLM 0.32.0 (`entrypoints/scale_out`) write them."""


def test_chunks_of_vllm_add_up() -> None:
    """Each has those of its own tokens."""
    asked = Asked("vllm", request(1, top_p=0.9), 259)
    streamed = StreamedPieces(asked, GenerateApi())
    for chunk in VLLM_CHUNKS:
        streamed.add(msgspec.json.decode(chunk % asked.request.request_id, type=GenerateChunk))

    reply = read_piece(asked, GenerateApi(), streamed.whole, "0")

    assert reply.masks == [[70, 9], [71]]


@pytest.mark.parametrize("streams", [False, True])
async def test_masks_pass_our_own_server(streams: bool, tmp_path: Any) -> None:
    """An engine in another process returns what it returns here."""
    asked = request(1, streams=streams, top_p=0.9)
    engine, tokenizer = scripted_engine(), toy_tokenizer()
    async with engine, served(engine, tokenizer, tmp_path) as provider:
        assert provider.capabilities.max_mask_ids == engine.capabilities.max_mask_ids
        result = await provider.generate(asked)

    true = scripted_masks(result.output_ids, PROMPT.size, "0", engine.capabilities.vocab_size)
    assert lists_of(result) == [mask.tolist() for mask in true]
