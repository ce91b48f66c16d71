"""How long an event loop was kept busy at a stretch, told in processor time of its thread.

Wall time would blame the loop for everything else that runs on the machine. What a thread beside it does inside one
call into C (which holds the interpreter) is not seen here; `bench/hostile_bodies.py` measures that.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

GROSS_S = 0.25
"""Five times what the loop may stand: nothing but work that does not belong there takes so much processor time."""


class LoopWatch:
    """Stands in the place of a loop's selector: between two looks at it the loop runs callbacks."""

    def __init__(self, selector: Any) -> None:
        self._selector = selector
        self._began_s = time.thread_time()
        self.worst_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        """What the selector says; notes what the callbacks before it took."""
        self.worst_s = max(self.worst_s, time.thread_time() - self._began_s)
        try:
            return self._selector.select(timeout)
        finally:
            self._began_s = time.thread_time()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)


@contextmanager
def watching(loop: asyncio.AbstractEventLoop) -> Iterator[LoopWatch]:
    """A watch over `loop` for the time of the block; works on asyncio's own loops, not on uvloop."""
    watched: Any = loop
    selector = watched._selector
    watch = watched._selector = LoopWatch(selector)
    try:
        yield watch
    finally:
        watched._selector = selector
