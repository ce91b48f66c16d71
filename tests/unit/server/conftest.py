"""What tests of the session server share."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.unit.server.loop_watch import GROSS_S, LoopWatch, watching


@pytest.fixture(name="loop_watch")
async def _loop_watch() -> AsyncIterator[LoopWatch]:
    """Measures the worst stall of the loop that the test and its server run on; a gross one fails the test."""
    with watching(asyncio.get_running_loop()) as watch:
        yield watch
    assert watch.worst_s < GROSS_S, f"the event loop was kept busy for {watch.worst_s:.2f} s of processor time"
