"""What tests of controllers share: servers in front of engines that note what they are told."""

from collections.abc import AsyncIterator

import pytest

from harness.engines.pool.pool import EnginePool
from tests.controllers.noting_engine import NotingEngine
from tests.session_servers.served import Client, serving_with


@pytest.fixture(name="engine")
def _engine() -> NotingEngine:
    return NotingEngine()


@pytest.fixture(name="client")
async def _client(engine: NotingEngine) -> AsyncIterator[Client[NotingEngine]]:
    """A client of a server in front of `engine`."""
    async with serving_with(engine) as client:
        yield client


@pytest.fixture(name="workers")
def _workers() -> list[NotingEngine]:
    return [NotingEngine(), NotingEngine()]


@pytest.fixture(name="pooled")
async def _pooled(workers: list[NotingEngine]) -> AsyncIterator[Client[EnginePool]]:
    """A client of a server in front of a pool of `workers`."""
    async with serving_with(EnginePool(workers)) as client:
        yield client
