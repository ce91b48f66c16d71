"""Aborting, cancelling, pausing, new weights, and the end of the local engine: between two tokens, and never a hang."""

import asyncio
import gc
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.errors import EngineError, EngineRejected, EngineUnavailable, ModelError
from harness.types import FinishReason, GenerationRequest, SamplingParams, TokenIds, VersionSpan, as_ids
from tests.local_model import LOCAL_ENGINE_GROUP

if TYPE_CHECKING:
    from harness.engines.huggingface.ragged_attention import KvStorage  # which imports torch

pytestmark = [pytest.mark.model, LOCAL_ENGINE_GROUP]

Prompt = Callable[[str], TokenIds]

ENDLESS = SamplingParams(4000, seed=1, ignore_eos=True)


def short(count: int = 8, seed: int = 1) -> SamplingParams:
    return SamplingParams(count, seed=seed, ignore_eos=True)


class Endless:
    """A generation that would continue for minutes, under way."""

    def __init__(self, provider: HuggingFaceTokenProvider, ids: TokenIds, session_id: str | None = None) -> None:
        self.request_id = uuid.uuid4().hex
        self.sampled = 0
        self._progress = asyncio.Event()
        self._stream = provider.stream(
            GenerationRequest(ids, ENDLESS, request_id=self.request_id, session_id=session_id)
        )
        self.task = asyncio.ensure_future(self._read())

    async def has_sampled(self, count: int) -> None:
        while self.sampled < count:
            self._progress.clear()
            await self._progress.wait()

    async def _read(self):
        async for event in self._stream:
            last = event
            self.sampled += 1
            self._progress.set()
        return last


@pytest.fixture(name="endless")
async def _endless(engine: HuggingFaceTokenProvider, prompt: Prompt):
    """Starts endless generations; what is left of them is aborted."""
    yield lambda text="Tell me everything.": Endless(engine, prompt(text))
    await engine.resume()
    await engine.abort(None)


async def test_abort_all_ends_the_waiting_ones_too(engine, endless) -> None:
    """More than fit into the batch: the rest ends with an empty output."""
    generations = [endless(f"Number {i}") for i in range(20)]
    await generations[0].has_sampled(1)

    assert await engine.abort(None) == 20
    results = [await generation.task for generation in generations]
    assert {result.finish_reason for result in results} == {FinishReason.ABORT}
    assert min(result.output_ids.size for result in results) == 0


async def test_kv_of_old_weights_is_never_used_again(engine, ask, update, prompt: Prompt) -> None:
    """The same session, the same prefix: computed again under the new weights, prompt logprobs included."""
    ids = prompt("Hello there, how are you today?")
    first = await ask.generate(ids, short(), session_id="s")
    await engine.update_weights(update.new_dir, "1")
    longer = as_ids(np.concatenate([ids, first.output_ids]))
    second = await ask.generate(longer, short(), session_id="s", prompt_logprobs_from=ids.size)
    await engine.update_weights(update.old_dir, "0")

    expected = update.new.logprobs(np.concatenate([longer, second.output_ids]))
    assert (second.cached_tokens, second.prompt_logprobs.version) == (0, "1")
    np.testing.assert_allclose(second.prompt_logprobs.logprobs, expected[ids.size - 1 : longer.size - 1], atol=1e-4)
    np.testing.assert_allclose(second.logprobs, expected[longer.size - 1 :], atol=1e-4)


@pytest.fixture(name="unfit_dir", params=["empty", "another model", "truncated"])
def _unfit_dir(request: pytest.FixtureRequest, update, small_dir: Path, tmp_path: Path) -> Path:
    """A checkpoint that cannot be loaded into the engine."""
    if request.param == "truncated":
        whole = (update.new_dir / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return small_dir if request.param == "another model" else tmp_path


async def test_a_checkpoint_that_does_not_fit_changes_nothing(engine, ask, update, prompt: Prompt, unfit_dir) -> None:
    """The old weights and their label continue serving."""
    with pytest.raises(EngineRejected):
        await engine.update_weights(unfit_dir, "7")
    result = await ask.generate(prompt("Still there?"), short())

    assert (engine.weight_version, result.version_spans[0].version) == ("0", "0")
    expected = update.old.logprobs(np.concatenate([result.input_ids, result.output_ids]))[result.input_ids.size - 1 :]
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


async def test_weights_that_are_not_numbers_fail_requests_but_not_the_engine(small_dir: Path, tmp_path: Path) -> None:
    """A trainer that diverged is answered with an error; better weights heal the engine."""
    import torch
    from safetensors.torch import load_file, save_file

    broken = {
        name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(small_dir / "model.safetensors").items()
    }
    save_file(broken, tmp_path / "model.safetensors")
    async with HuggingFaceTokenProvider(small_dir) as provider:
        await provider.update_weights(tmp_path, "1")
        with pytest.raises(EngineError, match="broken"):
            await provider.generate(GenerationRequest(as_ids([1, 2]), short(), request_id=uuid.uuid4().hex))
        await provider.update_weights(small_dir, "2")
        result = await provider.generate(GenerationRequest(as_ids([1, 2]), short(), request_id=uuid.uuid4().hex))

    assert result.version_spans == (VersionSpan("2", 0, 8),)


def kv_bytes(kv: "KvStorage") -> int:
    """What all sequences hold, unused room included."""
    layers = [layer for sequence in kv._sequences.values() for layer in sequence.layers.values()]
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


async def test_kv_memory_stays_within_its_bound(small_dir: Path) -> None:
    """More sessions than fit: prefixes go, sequences wait or are computed again, all of them finish."""
    bound = 300 * 512  # bytes: two layers of two heads of 16 numbers, keys and values
    held = []
    async with HuggingFaceTokenProvider(small_dir, kv_cache_bytes=bound, step_tokens=32) as provider:
        requests = [
            provider.generate(GenerationRequest(as_ids([i] * 60), short(60, seed=i), request_id=uuid.uuid4().hex))
            for i in range(1, 8)
        ]
        generations = asyncio.gather(*requests)
        while not generations.done():
            held.append(await provider._call(lambda engine: kv_bytes(engine._model.kv)))
        results = await generations

    assert 0 < max(held) <= bound
    assert {result.output_ids.size for result in results} == {60}


async def test_the_event_loop_runs_while_the_engine_computes(ask, prompt: Prompt) -> None:
    """A generation takes many turns of the loop, none of which it blocks."""
    generation = asyncio.ensure_future(ask.generate(prompt("Count."), short(8)))
    ticks = 0
    while not generation.done():
        await asyncio.sleep(0.001)
        ticks += 1

    assert ticks > 8


async def test_leaving_ends_what_is_in_flight(small_dir: Path) -> None:
    """With its partial output; afterwards nothing is accepted and the model is out of memory."""
    async with HuggingFaceTokenProvider(small_dir) as provider:
        engine = weakref.ref(provider._thread.engine)
        generation = Endless(provider, as_ids([1, 2, 3]))
        await generation.has_sampled(2)

    assert (await generation.task).finish_reason is FinishReason.ABORT
    assert not (await provider.health()).ready
    gc.collect()
    assert engine() is None
    with pytest.raises(EngineUnavailable):
        await provider.generate(GenerationRequest(as_ids([1]), short(), request_id=uuid.uuid4().hex))


async def test_a_crash_of_the_engine_is_told_to_everybody(small_dir: Path) -> None:
    """Running, waiting and later requests fail; none of them hangs."""

    def crash(_engine: object) -> None:
        raise MemoryError("no memory left")

    async with HuggingFaceTokenProvider(small_dir, max_batch=1) as provider:
        generations = [Endless(provider, as_ids([1, 2, i])) for i in range(3)]
        await generations[0].has_sampled(1)
        with pytest.raises(EngineError, match="no memory left"):
            await provider._call(crash)
        failures = await asyncio.gather(*[generation.task for generation in generations], return_exceptions=True)
        health = await provider.health()
        with pytest.raises(EngineError, match="no memory left"):
            await provider.generate(GenerationRequest(as_ids([1]), short(), request_id=uuid.uuid4().hex))

    assert [type(failure) for failure in failures] == [EngineError] * 3
    assert (health.ready, health.detail) == (False, "MemoryError: no memory left")


async def test_a_folder_that_is_not_a_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())

    with pytest.raises(ModelError, match="cannot load"):
        await HuggingFaceTokenProvider(tmp_path).__aenter__()
