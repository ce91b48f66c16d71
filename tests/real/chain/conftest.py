"""The engines of the chain's plays: those that other tests use too."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from harness.engines.connect import open_engine
from harness.gateway.router.gateway_program import GatewayProgram
from harness.tokens.tokenizer import Tokenizer
from tests.real_engines import of_one_version

PATIENCE_S = 300


@pytest.fixture(name="workers")
async def _workers(
    sglang_url: str, vllm_url: str, smg: GatewayProgram, model_dir: Path
) -> AsyncIterator[Mapping[str, str]]:
    """Both engines, of one label; after the test nothing is left in them."""
    del smg  # installed before anything begins
    workers = {"sglang": sglang_url, "vllm": vllm_url}
    async with of_one_version(*workers.values(), label="0"):  # as engines begin
        yield workers
    for kind, url in workers.items():
        async with (
            asyncio.timeout(PATIENCE_S),
            open_engine(f"{kind}={url}", tokenizer=Tokenizer.load(model_dir)) as engine,
        ):
            while (health := await engine.health()).running or health.waiting:
                await asyncio.sleep(0.1)
        assert not health.paused, kind
