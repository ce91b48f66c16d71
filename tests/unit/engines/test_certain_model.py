"""A model that is certain of every token: a constant stand-in is served, and nothing of it is scored."""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from msgspec import structs

from harness.engines.base import LogprobScale, is_on_prompt_scale
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.errors import EngineUnavailable
from harness.server.serving import serve
from harness.server.store.base import MemoryStore
from harness.types import SamplingParams
from tests.builders import toy_template, user
from tests.fake_engines.fake_server import serving
from tests.fake_engines.providers import fake_provider, make_fake, toy_tokenizer
from tests.session_servers.served import PATIENCE_S, Client


class Certain(ScriptedEngine):
    """Says its script with probability 1."""

    async def generate(self, request):
        result = await super().generate(request)
        return structs.replace(result, logprobs=np.zeros_like(result.logprobs))

    async def score(self, input_ids, *, start, session_id=None):
        scores = await super().score(input_ids, start=start)
        return replace(scores, logprobs=np.zeros_like(scores.logprobs))


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_model_that_is_certain_is_served_without_proximal_values(kind: str):
    """A warning, not a refusal to start: its scale cannot be measured, so no value of another scale may get in."""
    engine = Certain(toy_tokenizer(), Script((ScriptStep(text="Understood."),)), context_length=4096)
    fake = make_fake(kind, engine)
    async with (
        serving(fake, notices_disconnects=kind == "vllm"),
        serve(fake_provider(fake), toy_template(), MemoryStore()) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as http,
    ):
        client = Client(http, engine, running.server, running.url, running.restored)
        session = await client.create()
        first = await client.say(session, [user("a")])
        await engine.update_weights(Path("unused"), "1")
        await client.say(session, [user("a"), first, user("b")])
        [sample] = await client.samples(session)

        assert set(sample["behavior_versions"]) == {-1, 0, 1}
        assert sample["proximal_versions"] == sample["behavior_versions"]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_nothing_is_on_a_scale_that_nobody_knows(temperature: float):
    """Not even at temperature 1, where two known scales are one."""
    assert not is_on_prompt_scale(LogprobScale.UNKNOWN, SamplingParams(4, temperature=temperature))


class Interrupted(ScriptedEngine):
    """Somebody ends whatever it is asked for before it has said a word."""

    async def generate(self, request):
        asking = asyncio.create_task(super().generate(request))
        while not await self.abort(None):
            await asyncio.sleep(0)
        return await asking


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_self_test_that_somebody_aborts_measures_nothing(kind: str):
    """An abort of everything that meets a server at its start must not switch its proximal values off for good."""
    engine = Interrupted(toy_tokenizer(), Script((ScriptStep(text="Understood.", delay_s=5),)), context_length=4096)
    fake = make_fake(kind, engine)
    async with serving(fake, notices_disconnects=kind == "vllm"):
        with pytest.raises(EngineUnavailable, match="aborted"):
            async with fake_provider(fake):
                pass
