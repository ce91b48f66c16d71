"""An engine that lies is caught, over real HTTP, for every provider, streaming and not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from harness.engines.base import LogprobScale
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.engines.remote.vllm import VLLMTokenProvider
from harness.engines.scripted import ScriptStep
from harness.errors import (
    EngineConnectionLost,
    EngineError,
    EngineRejected,
    EngineReplyInvalid,
    EngineUnavailable,
    UnknownWeightVersion,
)
from harness.types import GenerationRequest, GenerationResult, SamplingParams, as_ids
from tests.fake_engines.fake_server import FakeServer, serving
from tests.fake_engines.lies import Lie
from tests.fake_engines.providers import FAKE_KINDS, fake_provider, make_fake, scripted_engine

PROMPT = as_ids([40, 41, 42, 43])
PARAMS = SamplingParams(max_new_tokens=6, temperature=0.7)

Provider = SGLangTokenProvider | VLLMTokenProvider

ERRORS: dict[Lie, type[EngineError]] = {
    Lie.BAD_LABEL: UnknownWeightVersion,
    Lie.TRUNCATED: EngineConnectionLost,
    Lie.HANG: EngineConnectionLost,
    Lie.STATUS_400: EngineRejected,
    Lie.STATUS_429: EngineUnavailable,
    Lie.STATUS_500: EngineError,
    Lie.STATUS_503: EngineUnavailable,
    Lie.ERROR_EVENT: EngineUnavailable,
    Lie.ABORT_503: EngineUnavailable,
}
ABOUT_SPANS = {Lie.SPAN_GAP, Lie.SPAN_OVERLAP, Lie.SPAN_SHORT, Lie.NO_SPANS, Lie.BAD_LABEL}
ABOUT_PROMPTS = {Lie.PROMPT_OTHER_IDS, Lie.PROMPT_SHORT, Lie.PROMPT_MISSING}


def lies(kind: str) -> list[Lie]:
    """The lies about sampling that servers of this kind can tell."""
    unable = {Lie.NONE, *ABOUT_PROMPTS}
    if kind == "vllm-completions":
        unable |= ABOUT_SPANS
    unable |= {Lie.ABORT_503} if kind.startswith("vllm") else {Lie.CLAMPED_LOGPROB}
    return [lie for lie in Lie if lie not in unable]


@asynccontextmanager
async def lying(kind: str, lie: Lie, **options: object) -> AsyncIterator[tuple[Provider, FakeServer]]:
    """A provider of a server that tells `lie` from now on."""
    fake = make_fake(kind, scripted_engine(ScriptStep(text="Hello there.", token_delay_s=0.001)))
    async with serving(fake, notices_disconnects=kind.startswith("vllm")):
        # Only silence has to run into the deadline; any other lie must be caught however slow the machine is.
        patience_s = 0.3 if lie is Lie.HANG else 30.0
        settings = {"logprob_scale": LogprobScale.AFTER_TEMPERATURE, "generation_timeout_s": patience_s} | options
        async with fake_provider(fake, **settings) as provider:
            fake.lie = lie
            yield provider, fake


async def ask(provider: Provider, *, stream: bool, prompt_logprobs_from: int | None = None) -> GenerationResult:
    """One generation, streamed or not."""
    request = GenerationRequest(PROMPT, PARAMS, uuid4().hex, prompt_logprobs_from=prompt_logprobs_from)
    if not stream:
        return await provider.generate(request)
    *_, result = [piece async for piece in provider.stream(request)]
    return result


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("kind", "lie"), [(kind, lie) for kind in FAKE_KINDS for lie in lies(kind)])
async def test_a_lie_is_caught(kind: str, lie: Lie, stream: bool):
    """Each lie is the typed error that says what is wrong, and the message names the engine."""
    async with lying(kind, lie) as (provider, fake):
        with pytest.raises(EngineError) as caught:
            await ask(provider, stream=stream)

    assert caught.type is ERRORS.get(lie, EngineReplyInvalid)
    if caught.type is not UnknownWeightVersion:
        assert fake.url in caught.value.message


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", FAKE_KINDS)
async def test_the_truth_is_believed(kind: str, stream: bool):
    """Without a lie the same request succeeds: the tests above fail for the lie and nothing else."""
    async with lying(kind, Lie.NONE) as (provider, _):
        result = await ask(provider, stream=stream, prompt_logprobs_from=1)

    assert result.output_ids.size == PARAMS.max_new_tokens
    assert result.prompt_logprobs is not None


@pytest.mark.parametrize("lie", sorted(ABOUT_PROMPTS))
@pytest.mark.parametrize("kind", FAKE_KINDS)
async def test_a_lie_about_the_prompt_is_caught(kind: str, lie: Lie):
    """Logprobs of the input must be those of the input, in scoring and beside a generation."""
    async with lying(kind, lie) as (provider, _):
        with pytest.raises(EngineReplyInvalid):
            await provider.score(PROMPT, start=1)
        with pytest.raises(EngineReplyInvalid):
            await ask(provider, stream=False, prompt_logprobs_from=1)


@pytest.mark.parametrize("kind", FAKE_KINDS)
async def test_a_message_names_the_request_and_both_values(kind: str):
    """Whoever reads the error knows what to look for in the engine's log."""
    async with lying(kind, Lie.WRONG_COUNT) as (provider, _):
        with pytest.raises(EngineReplyInvalid, match="the number of output tokens as 6, expected 7") as caught:
            await provider.generate(GenerationRequest(PROMPT, PARAMS, request_id="a" * 32))

    assert "a" * 32 in caught.value.message


@pytest.mark.parametrize("kind", FAKE_KINDS)
async def test_the_server_s_own_words_are_passed_on(kind: str):
    """A refusal says what the server said."""
    async with lying(kind, Lie.STATUS_400) as (provider, _):
        with pytest.raises(EngineRejected, match="so says the server"):
            await ask(provider, stream=False)


@pytest.mark.parametrize("kind", FAKE_KINDS)
async def test_scaled_logprobs_are_refused_at_entry(kind: str):
    """A server that divides sampled logprobs by the temperature is told how to be started instead."""
    fake = make_fake(kind, scripted_engine(ScriptStep(text="Hello there.")), divides_by_temperature=True)
    async with serving(fake, notices_disconnects=True):
        with pytest.raises(EngineReplyInvalid, match=r"SGLANG_RETURN_ORIGINAL_LOGPROB=1|raw_logprobs"):
            async with fake_provider(fake):
                pass
        async with fake_provider(fake, logprob_scale=LogprobScale.AFTER_TEMPERATURE) as provider:
            assert provider.capabilities.logprob_scale is LogprobScale.AFTER_TEMPERATURE


@pytest.mark.parametrize("kind", FAKE_KINDS)
async def test_a_server_that_is_not_there_is_unavailable(kind: str):
    """Entering a provider of nothing ends at once, and says which address it tried."""
    fake = make_fake(kind, scripted_engine())
    async with serving(fake, notices_disconnects=True):
        pass
    with pytest.raises(EngineUnavailable, match=fake.url):
        async with fake_provider(fake):
            pass


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch):
    """Tokens never travel through a proxy that somebody set for something else."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with lying("sglang", Lie.NONE) as (provider, _):
        assert (await ask(provider, stream=False)).output_ids.size == PARAMS.max_new_tokens


async def test_a_hanging_engine_does_not_hold_its_caller():
    """A generation is bounded in time, and is taken back from the engine when the time is over."""
    async with lying("sglang", Lie.HANG) as (provider, fake):
        async with asyncio.timeout(30):
            with pytest.raises(EngineConnectionLost, match="did not answer"):
                await ask(provider, stream=False)

        assert fake.paths[-1] == "/abort_request"
