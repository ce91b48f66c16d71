"""Ctrl+C, once and twice: the first asks the run to end well, the second makes it end now.

    first   nothing new starts; sessions are drained, agents stop at their next model call
    second  agents are killed

SIGTERM counts as Ctrl+C. An end that takes time is visible: the callbacks say what is being waited for.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl+C does, so that it closes what it has opened; in the main thread."""

    def interrupt(_: int, frame: FrameType | None) -> None:
        by_keyboard = signal.getsignal(signal.SIGINT)  # a loop that runs has one that cancels its task
        if callable(by_keyboard):
            by_keyboard(signal.SIGINT, frame)
        else:  # ignored, as of a job in the background of a script
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Interrupts:
    """How often somebody has asked this process to stop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @property
    def is_requested(self) -> bool:
        """Nothing new may start."""
        return self.first.is_set()

    def request(self) -> None:
        """Ask once more."""
        (self.second if self.first.is_set() else self.first).set()

    @contextmanager
    def from_signals(self) -> Iterator[None]:
        """Count the signals of the terminal for the time of the block; needs the running loop of the main thread."""
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
        """A block that the first request ends where it waits; `is_requested` tells whether it was run to its end."""

        async def expire() -> None:
            await self.first.wait()
            scope.reschedule(asyncio.get_running_loop().time())

        try:
            async with asyncio.timeout(None) as scope:
                watching = asyncio.create_task(expire())
                try:
                    yield
                finally:
                    watching.cancel()
        except TimeoutError:
            if not scope.expired():
                raise

    async def guard(self, work: Coroutine[Any, Any, None], *, drain: Callable[[], Awaitable[None]]) -> None:
        """Run `work` to its end; the first request calls `drain`, the second cancels `work`.

        Returns when `work` has ended, cancelled or not; `is_requested` tells whether it was left alone.
        """

        async def watch() -> None:
            await self.first.wait()
            draining = asyncio.ensure_future(drain())
            try:
                await self.second.wait()
            finally:
                draining.cancel()
                running.cancel()
                await asyncio.gather(draining, return_exceptions=True)

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(work)
            watching = tasks.create_task(watch())
            running.add_done_callback(lambda _: watching.cancel())
