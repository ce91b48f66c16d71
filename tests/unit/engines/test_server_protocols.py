"""What is particular to SGLang and to vLLM: how they are asked, what they lack, and what that means for a caller."""

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest

from harness.engines.base import LogprobScale, PauseMode
from harness.engines.remote.http_client import EngineClient
from harness.engines.remote.served_model import find_model
from harness.engines.scripted import ScriptStep
from harness.errors import EngineRejected, EngineReplyInvalid
from harness.types import FinishReason, GenerationRequest, GenerationResult, SamplingParams, as_ids
from tests.fake_engines.fake_server import UNFIT_WEIGHTS, serving
from tests.fake_engines.fake_vllm import FakeVLLM
from tests.fake_engines.providers import FAKE_KINDS, SLOWLY, fake_provider, make_fake, scripted_engine
from tests.session_servers.served import PATIENCE_S, eventually

PROMPT = as_ids([40, 41, 42])
GENERATING = {
    "sglang": "/generate",
    "sglang-incremental": "/generate",
    "vllm": "/inference/v1/generate",
    "vllm-completions": "/v1/completions",
}
UNSCALED = {"logprob_scale": LogprobScale.AFTER_TEMPERATURE}


@pytest.mark.parametrize("kind", FAKE_KINDS)
async def test_defaults_of_the_server_change_nothing(kind: str):
    """Every parameter that shapes the distribution is stated, penalties at their neutral values, no priority."""
    fake = make_fake(kind, scripted_engine(ScriptStep(text="Hello there.")))
    async with serving(fake, notices_disconnects=True), fake_provider(fake, **UNSCALED) as provider:
        await provider.generate(
            GenerationRequest(PROMPT, SamplingParams(max_new_tokens=3, top_p=0.5), request_id=uuid4().hex)
        )
    body = fake.bodies[-1]
    sampling = body.get("sampling_params", body)

    assert (sampling["repetition_penalty"], sampling["frequency_penalty"], sampling["top_p"]) == (1.0, 0.0, 0.5)
    assert (sampling["temperature"], sampling["min_p"]) == (1.0, 0.0)
    assert "priority" not in body


@pytest.mark.parametrize("kind", FAKE_KINDS)
async def test_a_score_has_no_priority(kind: str):
    """A weight update waits for the sweep's: behind all turns of a busy engine it would wait for ever."""
    fake = make_fake(kind, scripted_engine())
    async with serving(fake, notices_disconnects=True), fake_provider(fake, **UNSCALED) as provider:
        await provider.score(PROMPT, start=1)
    assert "priority" not in fake.bodies[-1]


async def test_sglang_is_not_asked_to_ignore_a_stop_id():
    """With `ignore_eos` it would continue after it without a word."""
    fake = make_fake("sglang", scripted_engine())
    async with serving(fake, notices_disconnects=False), fake_provider(fake, **UNSCALED) as provider:
        params = SamplingParams(max_new_tokens=3, ignore_eos=True, stop_token_ids=(7,))
        with pytest.raises(EngineRejected, match="ask for one of them"):
            await provider.generate(GenerationRequest(PROMPT, params, request_id=uuid4().hex))


@pytest.mark.parametrize("kind", ["sglang", "sglang-incremental"])
async def test_sglang_is_never_asked_for_its_health_route(kind: str):
    """`/health` generates a token, so it would declare a paused server dead."""
    fake = make_fake(kind, scripted_engine())
    async with serving(fake, notices_disconnects=False), fake_provider(fake) as provider:
        await provider.pause(PauseMode.KEEP)
        assert (await provider.health()).ready
        await provider.resume()

    assert "/health" not in fake.paths


async def test_sglang_loses_no_abort_of_a_request_that_came_during_a_pause():
    """The fake's gate loses such an abort, as the real one does, so the request must not have been there."""
    fake = make_fake("sglang", scripted_engine(SLOWLY))
    async with serving(fake, notices_disconnects=False), fake_provider(fake, **UNSCALED) as provider:
        await provider.pause(PauseMode.ABORT)
        request_id = uuid4().hex
        params = SamplingParams(max_new_tokens=400)
        task = asyncio.ensure_future(provider.generate(GenerationRequest(PROMPT, params, request_id=request_id)))
        async with asyncio.timeout(PATIENCE_S):
            while not (await provider.health()).waiting:
                await asyncio.sleep(0)
        await provider.abort(request_id)
        result = await asyncio.wait_for(task, PATIENCE_S)
        await provider.resume()

    assert (result.finish_reason, fake.bodies) == (FinishReason.ABORT, [])


@pytest.mark.parametrize("names_it", [True, False], ids=["one", "all"])
@pytest.mark.parametrize("kind", FAKE_KINDS)
async def test_an_abort_that_overtakes_its_request_ends_it_all_the_same(kind: str, names_it: bool):
    """Both servers ignore an abort of an id that they have not read yet."""
    fake, path = make_fake(kind, scripted_engine(SLOWLY)), GENERATING[kind]
    async with serving(fake, notices_disconnects=False), fake_provider(fake, **UNSCALED) as provider:
        fake.posted.clear()
        fake.holds[path] = asyncio.Event()
        request = GenerationRequest(PROMPT, SamplingParams(max_new_tokens=400), request_id=uuid4().hex)
        task = asyncio.ensure_future(provider.generate(request))
        await eventually(lambda: path in fake.posted)
        abort = asyncio.ensure_future(provider.abort(request.request_id if names_it else None))
        await eventually(lambda: any("abort" in posted for posted in fake.posted))
        fake.holds[path].set()
        result, told = await asyncio.gather(task, abort)

    assert (result.finish_reason, told) == (FinishReason.ABORT, 1)


@pytest.mark.parametrize("kind", ["sglang", "sglang-incremental"])
async def test_an_abort_in_sglang_s_queue_repeats_no_token(kind: str):
    """Its last chunk carries the last id again even in incremental mode; the count says that it is not a new one."""
    fake = make_fake(kind, scripted_engine(SLOWLY), repeats_last_id=True)
    async with serving(fake, notices_disconnects=False), fake_provider(fake, **UNSCALED) as provider:
        request_id = uuid4().hex
        stream = provider.stream(GenerationRequest(PROMPT, SamplingParams(max_new_tokens=400), request_id=request_id))
        sampled = 0
        async for piece in stream:
            if isinstance(piece, GenerationResult):
                break
            sampled += piece.output_ids.size
            if sampled == 5:
                asyncio.get_running_loop().create_task(provider.abort(request_id))

    assert piece.finish_reason is FinishReason.ABORT
    assert piece.output_ids.size == sampled


@pytest.mark.parametrize(("scale_out", "path"), [(True, "/inference/v1/generate"), (False, "/v1/completions")])
async def test_vllm_s_endpoint_is_found_at_entry_and_stated(scale_out: bool, path: str):
    """The one that the server has is used for everything, and `health` says which it is."""
    fake = FakeVLLM(scripted_engine(ScriptStep(text="Hello there.")), scale_out=scale_out)
    async with serving(fake, notices_disconnects=True), fake_provider(fake) as provider:
        before = len(fake.paths)
        await provider.generate(GenerationRequest(PROMPT, SamplingParams(max_new_tokens=3), request_id=uuid4().hex))

        assert {asked for asked in fake.paths[before:] if "generate" in asked or "completions" in asked} == {path}
        assert path in (await provider.health()).detail


@pytest.mark.parametrize("scale_out", [True, False])
async def test_vllm_without_dev_mode_says_what_is_missing(scale_out: bool):
    """Control verbs are refused with the way to get them, and the capabilities say so beforehand."""
    fake = FakeVLLM(scripted_engine(ScriptStep(text="Hello there.")), scale_out=scale_out, dev_mode=False)
    async with serving(fake, notices_disconnects=True), fake_provider(fake) as provider:
        assert (provider.capabilities.pause_modes, provider.capabilities.can_update_weights) == (frozenset(), False)
        for verb in (provider.pause(PauseMode.ABORT), provider.resume(), provider.update_weights(UNFIT_WEIGHTS, "1")):
            with pytest.raises(EngineRejected, match="VLLM_SERVER_DEV_MODE=1"):
                await verb
        assert (await provider.health()).ready


async def test_vllm_without_any_abort_endpoint_says_so():
    """An abort that cannot be sent is not one that worked."""
    fake = FakeVLLM(scripted_engine(SLOWLY), scale_out=False, dev_mode=False)
    async with serving(fake, notices_disconnects=True), fake_provider(fake, **UNSCALED) as provider:
        request_id = uuid4().hex
        task = asyncio.ensure_future(
            provider.generate(GenerationRequest(PROMPT, SamplingParams(max_new_tokens=400), request_id=request_id))
        )
        await eventually(lambda: bool(fake.engine.live))
        with pytest.raises(EngineRejected, match="--enable-scale-out"):
            await provider.abort(request_id)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_new_weights_find_no_kv_cache_of_the_old_ones(kind: str):
    """The flush that is missing: a resume whose prefill hits a stale prefix gets logprobs of neither version."""
    fake = make_fake(kind, scripted_engine(ScriptStep(text="Hello there.")))
    async with serving(fake, notices_disconnects=kind == "vllm"), fake_provider(fake) as provider:
        await provider.update_weights(Path("/weights/b"), "1")

    assert not fake.has_stale_cache


async def test_a_server_without_a_model_is_refused():
    fake = make_fake("sglang", scripted_engine())
    fake.serves_models = False
    async with serving(fake, notices_disconnects=True):
        client = EngineClient(fake.url, "sglang")
        client.open()
        try:
            with pytest.raises(EngineReplyInvalid, match="serves no model"):
                await find_model(client)
        finally:
            await client.close()
