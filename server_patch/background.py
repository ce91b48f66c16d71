"""A coroutine that runs during a block, and never longer."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

log = logging.getLogger(f"harness.{__name__}")


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` during the block, then cancel it. Log its failure at once, and raise it afterwards."""
    task = asyncio.create_task(work)  # a task group would wrap the errors of the block itself
    task.add_done_callback(_say_if_broken)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def _say_if_broken(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("background_work_failed", extra={"work": task.get_name()}, exc_info=error)
