"""What tests of the session server share."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from harness.engines.scripted import ScriptedEngine
from tests.session_servers.served import Client, Served, says, serving
from tests.unit.server.loop_watch import GROSS_S, LoopWatch, watching


def pytest_asyncio_loop_factories(item: pytest.Function) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Servers of these tests run on uvloop, as every command serves: its events come in another order than Python's.

    What a loop of Python's own is needed for is to see how long each of its events takes.
    """
    is_watched = "loop_watch" in item.fixturenames
    return {"asyncio": asyncio.new_event_loop} if is_watched else {"uvloop": uvloop.new_event_loop}


@pytest.fixture(name="loop_watch")
async def _loop_watch() -> AsyncIterator[LoopWatch]:
    """Measures the worst stall of the loop that the test and its server run on; a gross one fails the test."""
    gc.collect()
    gc.freeze()  # as a server does: what other tests have left is not looked through in the midst of this one
    with watching(asyncio.get_running_loop()) as watch:
        yield watch
    assert watch.worst_s < GROSS_S, f"the event loop was kept busy for {watch.worst_s:.2f} s of processor time"


@pytest.fixture(name="client")
async def _client() -> AsyncIterator[Client[ScriptedEngine]]:
    """A client of a server with nothing set, whose model says "one" and "two" in turn."""
    async with serving(*says("one", "two")) as client:
        yield client


@pytest.fixture(name="session")
async def _session(client: Client[ScriptedEngine]) -> Served:
    return await client.create()
