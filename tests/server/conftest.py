"""What tests of the session server share."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import structlog
from loop_watch import GROSS_S, LoopWatch, watching


@pytest.fixture(name="quiet_logs")
def _quiet_logs() -> Iterator[None]:
    """State machines do in a second what a server does in a day: nobody reads its log."""
    structlog.configure(processors=[_drop])
    yield
    structlog.reset_defaults()


def _drop(logger: Any, method: str, event: Any) -> Any:
    raise structlog.DropEvent


@pytest.fixture(name="loop_watch")
async def _loop_watch() -> AsyncIterator[LoopWatch]:
    """Measures the worst stall of the loop that the test and its server run on; a gross one fails the test."""
    with watching(asyncio.get_running_loop()) as watch:
        yield watch
    assert watch.worst_s < GROSS_S, f"the event loop was kept busy for {watch.worst_s:.2f} s of processor time"
