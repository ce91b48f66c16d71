"""What the local engine reports is what the model's own forward pass says of the same ids."""

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.errors import EngineRejected, ModelError
from harness.tokens.tokenizer import Tokenizer
from harness.types import FinishReason, GenerationRequest, GenerationResult, SamplingParams, TokenIds, as_ids
from tests.local_model import KV_BYTES, LOCAL_ENGINE_GROUP, Asking

pytestmark = [pytest.mark.model, LOCAL_ENGINE_GROUP]

Prompt = Callable[[str], TokenIds]


def params(max_new_tokens: int = 12, **options: object) -> SamplingParams:
    return SamplingParams(max_new_tokens, **{"ignore_eos": True, **options})


def assert_true(result: GenerationResult, plain) -> None:
    whole = np.concatenate([result.input_ids, result.output_ids])
    expected = plain.logprobs(whole)[result.input_ids.size - 1 :]
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


async def test_logprobs_of_a_mixed_batch_are_those_of_a_plain_forward(ask, plain, prompt: Prompt) -> None:
    """Prompts of all lengths, chunked or not, computed together with decoding sequences."""
    words = "the quick brown fox jumps over the lazy dog and then "
    prompts = [prompt(words * repeats) for repeats in (0, 1, 2, 5, 9, 15)]

    results = await asyncio.gather(*[ask.generate(ids, params(seed=i)) for i, ids in enumerate(prompts)])

    for result in results:
        assert_true(result, plain)


async def test_a_script_is_said_with_the_logprobs_of_the_model(engine, plain, prompt: Prompt, tokenizer) -> None:
    """Beside a request that is left alone, and whatever its filters would leave out; the end of turn ends it."""
    script_ids = as_ids([*tokenizer.encode("xylophone 7 quartz"), 2])
    ids, wanted = prompt("Hello!"), SamplingParams(40, top_k=1)

    def request(**more: object) -> GenerationRequest:
        return GenerationRequest(ids, wanted, uuid.uuid4().hex, **more)

    alone = await engine.generate(request())
    told, free = await asyncio.gather(engine.generate(request(script_ids=script_ids)), engine.generate(request()))

    assert (told.output_ids.tolist(), told.finish_reason) == (script_ids.tolist(), FinishReason.STOP)
    assert free.output_ids.tolist() == alone.output_ids.tolist()
    assert_true(told, plain)


async def test_the_next_turn_of_a_session_reuses_its_kv_and_stays_true(ask, plain, prompt: Prompt) -> None:
    """Everything but the last sampled token, which was never computed, comes from the cache."""
    first = await ask.generate(prompt("Guess my number, it is below 10."), params(seed=1), session_id="s")
    follow_up = np.concatenate([first.input_ids, first.output_ids, prompt("Higher!")])
    second = await ask.generate(as_ids(follow_up), params(seed=2), session_id="s")

    assert second.cached_tokens == first.input_ids.size + first.output_ids.size - 1
    assert_true(second, plain)


async def test_forks_of_one_prefix_stay_true(ask, plain, prompt: Prompt) -> None:
    """Samples of one prompt share its KV; so do sessions that differ only at the end."""
    shared = "A story about a lighthouse keeper, a storm and a very old ship. " * 3
    results = await asyncio.gather(
        *[ask.generate(prompt(shared), params(seed=seed)) for seed in range(4)],
        *[ask.generate(prompt(f"{shared}{ending}"), params(seed=9)) for ending in ("Short.", "Long.")],
    )

    assert min(result.cached_tokens for result in results[1:]) > 30
    for result in results:
        assert_true(result, plain)


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_busy_batch(ask, prompt: Prompt) -> None:
    """Reproducible by the request itself, whatever else is going on."""
    wanted = params(24, seed=42, temperature=1.2, top_p=0.95)
    ids = prompt("Invent a word and explain it.")
    alone = await ask.generate(ids, wanted)
    busy, *_ = await asyncio.gather(
        ask.generate(ids, wanted),
        *[ask.generate(prompt(f"Number {i} " * (10 * i)), params(24, seed=i)) for i in range(1, 6)],
    )

    assert busy.output_ids.tolist() == alone.output_ids.tolist()


async def test_a_request_that_goes_on_after_an_abort_gives_the_tokens_it_would_have_given(ask, prompt: Prompt) -> None:
    """Randomness depends on the position in the sequence, not on the request."""
    ids = prompt("Invent a word and explain it.")
    whole = await ask.generate(ids, params(20, seed=5))
    part = await ask.generate(ids, params(8, seed=5))
    rest = await ask.generate(as_ids(np.concatenate([ids, part.output_ids])), params(12, seed=5))

    assert [*part.output_ids, *rest.output_ids] == whole.output_ids.tolist()


async def test_without_a_seed_two_requests_differ(ask, prompt: Prompt) -> None:
    ids = prompt("Write a random sentence.")
    results = [await ask.generate(ids, params(16, temperature=1.5)) for _ in range(2)]

    assert results[0].output_ids.tolist() != results[1].output_ids.tolist()


@pytest.mark.parametrize("start", [1, 40, 150])
async def test_prompt_logprobs_are_those_of_a_plain_forward(ask, plain, prompt: Prompt, start: int) -> None:
    """From any start, over several chunks, whatever is in the cache."""
    ids = prompt("one two three four five six seven eight nine ten " * 14)
    result = await ask.generate(ids, params(2), prompt_logprobs_from=start)

    assert (result.prompt_logprobs.start, result.prompt_logprobs.version) == (start, "0")
    np.testing.assert_allclose(result.prompt_logprobs.logprobs, plain.logprobs(ids)[start - 1 :], atol=1e-4)
    assert_true(result, plain)


async def test_most_likely_tokens_of_a_prompt_are_those_of_a_plain_forward(engine, plain, prompt: Prompt) -> None:
    """Beside its logprobs, over several chunks."""
    ids, start = prompt("one two three four five six seven eight nine ten " * 14), 40
    scores = await engine.score(ids, start=start, top=4)
    truth = plain.distributions(ids)[start - 1 : -1]

    assert scores.top.ids.shape == (ids.size - start, 4)
    np.testing.assert_allclose(scores.top.logprobs, np.sort(truth, axis=-1)[:, :-5:-1], atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(truth, scores.top.ids, -1), scores.top.logprobs, atol=1e-4)


async def test_top_logprobs_are_the_best_of_the_distribution(ask, plain, prompt: Prompt) -> None:
    """Best first, on the raw scale, as many as asked for."""
    ids = prompt("Yes or no?")
    result = await ask.generate(ids, params(3, top_logprobs=4, temperature=0.7))
    whole = np.concatenate([ids, result.output_ids])
    expected = np.sort(plain.distributions(whole)[ids.size - 1 : -1], axis=-1)[:, :-5:-1]

    assert result.top_logprobs.ids.shape == (3, 4)
    np.testing.assert_allclose(result.top_logprobs.logprobs, expected, atol=1e-4)


async def test_ends_of_turns_stop_ids_and_stop_strings_stop(
    whole_model_dir: Path, tokenizer: Tokenizer, prompt: Prompt
) -> None:
    """The tokens of the match stay in the output, and it is named; with the whole model, which knows an answer."""
    ids = prompt("What is the capital of France?")
    france = tokenizer.encode(" France")[0]
    async with HuggingFaceTokenProvider(whole_model_dir, kv_cache_bytes=KV_BYTES) as whole:
        ask = Asking(whole)
        by_itself = await ask.generate(ids, SamplingParams(40, temperature=0))
        by_id = await ask.generate(ids, SamplingParams(40, temperature=0, stop_token_ids=(france,)))
        by_text = await ask.generate(ids, SamplingParams(40, temperature=0, stop=("of Fra", "zzz")))

    assert tokenizer.decode(by_itself.output_ids.tolist()) == "The capital of France is Paris.<|im_end|>"
    assert (by_itself.finish_reason, by_itself.matched_stop) == (FinishReason.STOP, 2)
    assert (by_id.finish_reason, by_id.matched_stop, by_id.output_ids[-1]) == (FinishReason.STOP, france, france)
    assert (by_text.finish_reason, by_text.matched_stop) == (FinishReason.STOP, "of Fra")
    assert tokenizer.decode(by_text.output_ids.tolist()) == "The capital of France"


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        ([1, 49152], {}),
        ([1, -1], {}),
        ([], {}),
        ([1], {"top_p": 0.0}),
        ([1], {"temperature": -1.0}),
        ([1], {"top_logprobs": 21}),
    ],
)
async def test_what_cannot_be_served_is_refused(ask, ids: list[int], options: dict[str, object]) -> None:
    with pytest.raises(EngineRejected):
        await ask.generate(as_ids(ids), params(**options))

    assert (await ask.generate(as_ids([1]), params(1))).output_ids.size == 1


@pytest.mark.parametrize(
    ("config_class", "settings"),
    [
        ("MistralConfig", {"sliding_window": 8}),
        ("Qwen3Config", {}),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ],
)
async def test_other_architectures_are_true_too(
    make_small_model, plain_model, config_class: str, settings: dict[str, object]
) -> None:
    """Sliding windows smaller than a chunk, biases, normalized heads."""
    directory = make_small_model(config_class, **settings)
    ids = as_ids(np.arange(1000, 1060))
    async with HuggingFaceTokenProvider(directory, step_tokens=16) as provider:
        result = await provider.generate(
            GenerationRequest(ids, params(20), request_id=uuid.uuid4().hex, prompt_logprobs_from=1)
        )

    whole = plain_model(directory).logprobs(np.concatenate([ids, result.output_ids]))
    np.testing.assert_allclose(np.concatenate([result.prompt_logprobs.logprobs, result.logprobs]), whole, atol=1e-4)


@pytest.mark.parametrize(
    ("config_class", "settings"),
    [
        ("Gemma2Config", {}),
        ("GptOssConfig", {"num_local_experts": 2, "num_experts_per_tok": 1}),
        ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
async def test_a_model_that_would_be_computed_wrongly_is_refused(
    make_small_model, config_class: str, settings: dict[str, object]
) -> None:
    """Soft caps, sinks and rotary embeddings that depend on the batch: a clear error, not other logprobs."""
    provider = HuggingFaceTokenProvider(make_small_model(config_class, **settings))

    with pytest.raises(ModelError, match="local engine"):
        await provider.__aenter__()
