"""Work that would stop the event loop for longer than a moment: reading and encoding large requests.

It has two threads of its own, so that neither records nor the store wait behind a giant prompt. What waits for one of
them is counted and bounded by its size in memory; beyond that a request is refused for now (`ServerBusy`). Encoding
lets other threads run meanwhile; the rest of such work is cut into pieces where it is done, because a single call into
C holds the interpreter until it returns.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from harness.errors import ServerBusy
from harness.telemetry.metrics import ServerMetrics

_T = TypeVar("_T")

_PLACES = 2


class HeavyWork:
    """The threads, and who waits for them."""

    def __init__(self, metrics: ServerMetrics, most_bytes: int) -> None:
        self._executor = ThreadPoolExecutor(_PLACES, thread_name_prefix="heavy-work")
        self._metrics = metrics
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._lock = Lock()  # ends of work are noted in its own thread, whoever still waits for it

    async def do(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        """What `work` returns or raises, done off the event loop; it holds `size_bytes` until it is done.

        Raises `ServerBusy` when too much is held already. Work that nobody waits for any more does not begin.
        """
        with self._lock:
            if self._held_bytes and self._held_bytes + size_bytes > self._most_bytes:
                raise ServerBusy(
                    f"{self._held_bytes} bytes of requests wait to be read and encoded; expected at most"
                    f" {self._most_bytes} with this one of {size_bytes}; ask again in a moment"
                )
            self._held_bytes += size_bytes
        self._metrics.heavy_work_began(size_bytes)
        future = self._executor.submit(work)
        future.add_done_callback(partial(self._release, size_bytes))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Begin nothing more; what has begun comes to its end, for nobody."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _release(self, size_bytes: int, future: Future[Any]) -> None:
        del future
        with self._lock:
            self._held_bytes -= size_bytes
        self._metrics.heavy_work_ended(size_bytes)
