"""The doctor tells what a server can do from what it does, and what is wrong from what is missing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from harness.engines.base import PauseMode
from harness.engines.examine.doctor import Diagnosis, diagnose
from harness.engines.remote.vllm import VLLMTokenProvider
from harness.engines.scripted import ScriptStep
from harness.errors import EngineUnavailable
from harness.machine.findings import Finding, Level
from harness.tokens.tokenizer import Tokenizer
from tests.fake_engines.fake_server import FakeServer, serving
from tests.fake_engines.fake_sglang import FakeSGLang
from tests.fake_engines.fake_vllm import FakeVLLM
from tests.fake_engines.providers import scripted_engine, toy_tokenizer

OK, UNKNOWN, WARN, FAIL = Level
STEADILY = ScriptStep(text="The quick brown fox jumps over the lazy dog. " * 40, token_delay_s=0.002)


@asynccontextmanager
async def examined(fake: FakeServer, tokenizer: Tokenizer | None = None) -> AsyncIterator[Diagnosis]:
    async with serving(fake, notices_disconnects=True) as url:
        yield await diagnose(url, tokenizer=tokenizer)


def levels(diagnosis: Diagnosis) -> dict[str, Level]:
    return {finding.check: finding.level for finding in diagnosis.findings}


def evidence(diagnosis: Diagnosis, capability: str) -> str:
    return found(diagnosis, capability).found


def found(diagnosis: Diagnosis, capability: str) -> Finding:
    return next(finding for finding in diagnosis.findings if finding.check == capability)


@pytest.mark.parametrize("kind", [FakeSGLang, FakeVLLM])
async def test_what_a_whole_server_can_do_is_proven_by_doing_it(kind: type[FakeServer]):
    """Nothing is inferred but the two routes that are not tried; the weights are elsewhere, so they stay unknown."""
    async with examined(kind(scripted_engine(STEADILY)), toy_tokenizer()) as diagnosis:
        assert levels(diagnosis) == {
            "token endpoint": OK,
            "version spans": OK,
            "prompt logprobs": OK,
            "raw logprobs": OK,
            "abort": OK,
            "repeat guard": WARN,
            "pause": OK,
            "weight updates": OK,
            "context length": OK,
            "vocabulary": UNKNOWN,
            "tokenizer": OK,
        }
        assert diagnosis.is_usable
        assert "'abort'" in evidence(diagnosis, "abort")
        assert "differ by 0.0000 nats" in evidence(diagnosis, "raw logprobs")


@pytest.mark.parametrize("kind", [FakeSGLang, FakeVLLM])
async def test_nothing_that_would_disturb_others_is_tried(kind: type[FakeServer]):
    """No pause, no new weights, and hardly a token."""
    fake = kind(scripted_engine(STEADILY))
    async with examined(fake, toy_tokenizer()):
        posted = set(fake.posted)

    assert not posted & {"/pause", "/pause_generation", "/resume", "/continue_generation", "/collective_rpc"}
    assert not posted & {"/update_weights_from_disk", "/update_weight_version", "/reset_prefix_cache"}
    assert not (await fake.engine.health()).running


async def test_a_plain_vllm_server_lacks_what_its_options_bring():
    """Each line names the option; without an abort no session can be served."""
    fake = FakeVLLM(scripted_engine(STEADILY), scale_out=False, dev_mode=False)
    async with examined(fake, toy_tokenizer()) as diagnosis:
        lacking = {name for name, level in levels(diagnosis).items() if level in (WARN, FAIL)}

        assert lacking == {"version spans", "abort", "pause", "weight updates", "repeat guard"}
        assert "--enable-scale-out" in evidence(diagnosis, "version spans")
        assert "VLLM_SERVER_DEV_MODE=1" in evidence(diagnosis, "abort")
        assert not diagnosis.is_usable
        document = {each["capability"]: each for each in diagnosis.to_json()["findings"]}
        assert document["pause"]["evidence"] == evidence(diagnosis, "pause")
        assert [(each["answer"], each["is_needed"]) for name, each in document.items() if name in lacking] == [
            ("no", False),
            ("no", True),
            ("no", False),
            ("no", False),
            ("no", False),
        ]


async def test_logprobs_on_another_scale_are_found():
    async with examined(
        FakeSGLang(scripted_engine(STEADILY), divides_by_temperature=True), toy_tokenizer()
    ) as diagnosis:
        assert (found(diagnosis, "raw logprobs").level, diagnosis.is_usable) == (FAIL, False)


async def test_another_tokenizer_is_found(model_dir: Path):
    """The first text that differs is shown with both versions of it."""
    async with examined(FakeSGLang(scripted_engine(STEADILY)), Tokenizer.load(model_dir)) as diagnosis:
        assert (found(diagnosis, "tokenizer").level, diagnosis.is_usable) == (FAIL, False)
        assert "'Hello, world!' is [" in evidence(diagnosis, "tokenizer")


async def test_without_a_model_nothing_is_guessed():
    """What needs the vocabulary is not looked into, and says what to pass."""
    async with examined(FakeSGLang(scripted_engine(STEADILY))) as diagnosis:
        unknown = {name for name, level in levels(diagnosis).items() if level is UNKNOWN}

        assert unknown == {"vocabulary", "raw logprobs", "tokenizer"}
        assert all("pass --model" in evidence(diagnosis, name) for name in unknown)
        assert diagnosis.is_usable


async def test_a_paused_engine_is_not_asked_for_tokens():
    fake = FakeVLLM(scripted_engine(STEADILY))
    async with serving(fake, notices_disconnects=True) as url:
        async with VLLMTokenProvider(url, vocab_size=toy_tokenizer().vocab_size) as provider:
            await provider.pause(PauseMode.ABORT)
        asked = len(fake.bodies)
        diagnosis = await diagnose(url, tokenizer=toy_tokenizer())

    assert "resume it" in evidence(diagnosis, "token endpoint")
    assert (diagnosis.is_usable, len(fake.bodies)) == (False, asked)


async def test_an_address_without_an_engine_is_an_error():
    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        await diagnose("http://127.0.0.1:1")

    app = web.Application()
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        with pytest.raises(EngineUnavailable, match="neither SGLang nor vLLM"):
            await diagnose(f"http://{host}:{port}")
    finally:
        await runner.cleanup()
