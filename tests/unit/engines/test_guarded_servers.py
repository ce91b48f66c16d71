"""The repeat guard of a server, seen through its provider: proven at entry, read from every reply, never assumed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from harness.engines.base import LogprobScale
from harness.engines.connect import open_engine
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.engines.remote.vllm import VLLMTokenProvider
from harness.engines.scripted import ScriptStep
from harness.errors import EngineReplyInvalid, ScenarioError
from harness.types import FinishReason, GenerationRequest, GenerationResult, SamplingParams, as_ids
from server_patch.repeat_terminate import RepeatTerminateConfig
from server_patch.repeat_terminate.config import CONFIG_JSON, ENABLE
from tests.fake_engines.fake_server import FakeServer, serving
from tests.fake_engines.providers import FAKE_KINDS, fake_provider, make_fake, scripted_engine, toy_tokenizer

CONFIG = RepeatTerminateConfig(
    enabled=True, min_new_tokens=4, max_consecutive_token_repeats=6, ngram_size=3, ngram_repeats=3
)
PROMPT = as_ids([40, 41, 42])
BUDGET = SamplingParams(max_new_tokens=30)
TURNING = (50, 51, 52, 60, 61, 62, 60, 61, 62, 60, 61, 62, 60, 61, 62, 60, 61, 62)
STOP_AFTER = 12
"""Tokens of `TURNING` up to the third time that 60, 61, 62 is through."""

Provider = SGLangTokenProvider | VLLMTokenProvider

pytestmark = pytest.mark.parametrize("kind", FAKE_KINDS)


@asynccontextmanager
async def fake_server(
    kind: str, *tokens: int, guard: RepeatTerminateConfig | None = CONFIG
) -> AsyncIterator[FakeServer]:
    """A server that says `tokens` and is guarded by `guard`."""
    fake = make_fake(kind, scripted_engine(ScriptStep(tokens=tokens)), repeat_guard=guard)
    async with serving(fake, notices_disconnects=True):
        yield fake


def provider_of(fake: FakeServer, wanted: RepeatTerminateConfig | None = CONFIG) -> Provider:
    """A provider that wants `wanted`."""
    return fake_provider(fake, repeat_guard=wanted, logprob_scale=LogprobScale.AFTER_TEMPERATURE)


async def ask(
    provider: Provider, *, stream: bool = False, ids: tuple[int, ...] = (), continues: int = 0
) -> GenerationResult:
    """One generation after `PROMPT` and `ids`."""
    prompt = as_ids([*PROMPT.tolist(), *ids])
    request = GenerationRequest(prompt, SamplingParams(BUDGET.max_new_tokens), uuid4().hex, continues=continues)
    if not stream:
        return await provider.generate(request)
    pieces = [piece async for piece in provider.stream(request)]
    result = pieces[-1]
    assert isinstance(result, GenerationResult)
    assert sum(piece.output_ids.size for piece in pieces[:-1]) == result.output_ids.size
    return result


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_output_that_repeats_itself_ends_there(kind: str, stream: bool):
    """With its own finish reason, all its tokens sampled, none forced."""
    async with fake_server(kind, *TURNING) as fake, provider_of(fake) as provider:
        result = await ask(provider, stream=stream)

    assert result.finish_reason is FinishReason.REPEAT
    assert tuple(result.output_ids) == TURNING[:STOP_AFTER]
    assert (result.forced_tokens, result.matched_stop) == (0, None)


async def test_the_proof_is_in_the_capabilities(kind: str):
    async with fake_server(kind, *TURNING) as fake:
        async with provider_of(fake) as provider:
            assert provider.capabilities.repeat_guard == CONFIG.digest()
        async with provider_of(fake, wanted=RepeatTerminateConfig()) as provider:
            assert provider.capabilities.repeat_guard is None
            assert await provider.active_guard() == CONFIG.digest()


async def test_a_server_without_a_guard_is_refused(kind: str):
    """Entering says what is missing and how to start the server instead."""
    async with fake_server(kind, *TURNING, guard=None) as fake:
        with pytest.raises(ScenarioError, match=r"none that is active.*SGLANG_PLUGINS or VLLM_PLUGINS.*ENABLE='1'"):
            async with provider_of(fake):
                pass
        async with provider_of(fake, wanted=RepeatTerminateConfig()) as provider:
            assert await provider.active_guard() is None
            assert (await ask(provider)).finish_reason is FinishReason.STOP


async def test_a_server_with_other_limits_is_refused(kind: str):
    """Two processes with one digest decide alike; these two would not."""
    other = RepeatTerminateConfig(enabled=True)
    async with fake_server(kind, *TURNING, guard=other) as fake:
        with pytest.raises(ScenarioError, match=f"other limits .digest {other.digest()[:12]}"):
            async with provider_of(fake):
                pass


async def test_the_environment_can_want_the_guard(kind: str, monkeypatch: pytest.MonkeyPatch):
    """The variables that guard the local engine here demand the same of a server elsewhere."""
    monkeypatch.setenv(ENABLE, "1")
    monkeypatch.setenv(CONFIG_JSON, '{"min_new_tokens": 7}')
    async with fake_server(kind, *TURNING, guard=None) as fake:
        with pytest.raises(ScenarioError, match="a repeat guard is wanted"):
            async with fake_provider(fake, logprob_scale=LogprobScale.AFTER_TEMPERATURE):
                pass


async def test_servers_opened_by_name_must_run_the_guard_that_is_stated(kind: str):
    """As a scenario states it; every worker of a pool is asked."""
    async with fake_server(kind, *TURNING) as fake, fake_server(kind, *TURNING, guard=None) as unguarded:
        name = f"{kind.partition('-')[0]}={fake.url}"
        async with open_engine(name, tokenizer=toy_tokenizer(), repeat_guard=CONFIG) as engine:
            assert engine.capabilities.repeat_guard == CONFIG.digest()
        with pytest.raises(ScenarioError, match="none that is active"):
            async with open_engine(f"{name},{unguarded.url}", tokenizer=toy_tokenizer(), repeat_guard=CONFIG):
                pass


async def test_a_server_that_lost_its_guard_is_noticed(kind: str):
    """SGLang's replies then lack their mark; vLLM has none to lack, which the look at every turn makes up for."""
    async with fake_server(kind, *TURNING) as fake, provider_of(fake) as provider:
        fake.repeat_guard = None
        if kind.startswith("vllm"):
            assert (await ask(provider)).finish_reason is FinishReason.STOP
        else:
            with pytest.raises(EngineReplyInvalid, match="no repeat_terminate in its finish reason"):
                await ask(provider)
