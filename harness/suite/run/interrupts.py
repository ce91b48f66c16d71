"""Early ends of a run: one error for many, and Ctrl+C or SIGTERM, once and twice.

first   start nothing new, drain sessions; agents stop at their next model call
second  kill the agents
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

from harness.errors import HarnessError
from harness.machine.deadlines import beside

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Make SIGTERM end the block like Ctrl+C, releasing its resources. Main thread only."""

    def interrupt(_: int, frame: FrameType | None) -> None:
        by_keyboard = signal.getsignal(signal.SIGINT)  # a running loop installs one that cancels its task
        if callable(by_keyboard):
            by_keyboard(signal.SIGINT, frame)
        else:  # ignored, as in a script's background job
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Interrupts:
    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @property
    def is_requested(self) -> bool:
        return self.first.is_set()

    def request(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    @contextmanager
    def from_signals(self) -> Iterator[None]:
        """Count signals during the block, in the main thread's running loop."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.request)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    @asynccontextmanager
    async def until_request(self) -> AsyncIterator[None]:
        """End the block silently at the first request; then check `is_requested`."""

        async def expire() -> None:
            await self.first.wait()
            scope.reschedule(asyncio.get_running_loop().time())

        try:
            async with asyncio.timeout(None) as scope, beside(expire(), name="await a request to stop"):
                yield
        except TimeoutError:
            # Not from a request: a timeout inside the block.
            if not scope.expired():
                raise

    async def guard(self, work: Coroutine[Any, Any, None], *, drain: Callable[[], Awaitable[None]]) -> None:
        """Run `work`. The first request calls `drain`, the second cancels `work`, and this still returns normally."""

        async def watch() -> None:
            await self.first.wait()
            draining = asyncio.ensure_future(drain())
            try:
                await self.second.wait()
            finally:
                # After the second request, or when `work` ended first.
                draining.cancel()
                running.cancel()
                await asyncio.gather(draining, return_exceptions=True)

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(work)
            watching = tasks.create_task(watch())
            running.add_done_callback(lambda _: watching.cancel())


@contextmanager
def one_error() -> Iterator[None]:
    """Raise one error of a group: the first `HarnessError`, else the first."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group.subgroup(HarnessError) or group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group
