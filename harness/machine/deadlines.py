"""Await foreign code for a bounded time.

`within` trusts work to obey its cancellation, `attempt` does not. `persist` retries, `work_through` limits concurrency,
`to_the_end` shields from cancellation, `beside` runs work during a block, `Deadline` ends one.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_before_delay, wait_exponential

from harness.errors import HarnessError

_T = TypeVar("_T")

OBEY_S = 0.2
"""Time for a cancelled call to end, at most its own limit."""

_ATTEMPTS = 4  # of calls that hang
_SHORTEST_ATTEMPT_S = 1.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class Deadline:
    """Raise `TimeoutError` in a block that lasts longer. As `asyncio.timeout`, at half its price: a turn enters six."""

    __slots__ = ("_cancelling", "_handle", "_is_over", "_loop", "_seconds", "_task", "has_passed")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self.has_passed = self._is_over = False
        self._handle: asyncio.Handle | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task(self._loop)
        assert task is not None, "a deadline cancels the task of its block"
        self._task, self._cancelling = task, task.cancelling()
        if self._seconds is not None:
            self.move(self._seconds)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._is_over = True
        if self._handle is not None:
            self._handle.cancel()
        if self.has_passed and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def move(self, seconds: float = 0.0) -> None:
        """End the block `seconds` from now, at its next `await` if that is zero; too late, do nothing."""
        if self._handle is not None:
            self._handle.cancel()
        if not (self.has_passed or self._is_over):
            later = seconds > 0
            self._handle = self._loop.call_later(seconds, self._pass) if later else self._loop.call_soon(self._pass)

    def _pass(self) -> None:
        self.has_passed = True
        self._task.cancel()


async def within(seconds: float, work: Awaitable[object]) -> bool:
    """Await `work` for `seconds`, then cancel it. Return True if it ended in time."""
    try:
        with Deadline(seconds):
            await work
    except TimeoutError:
        return False
    return True


async def await_any(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def bound_of_call(left_s: float) -> float:
    """Return the limit of an `attempt` that must end in `left_s`."""
    return max(0.0, left_s - OBEY_S, left_s / 2)


async def attempt(call: Callable[[], Awaitable[object]], seconds: float, *, name: str) -> str | None:
    """Return the reason why `call` failed, or None, after `seconds` plus `OBEY_S` at most."""

    async def await_call() -> None:  # a task takes a coroutine, and `call` may return any awaitable
        await call()

    task = asyncio.create_task(await_call(), name=name)
    task.add_done_callback(read_end)  # it may end while the caller is cancelled
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=min(OBEY_S, seconds))
    if not task.done() or task.cancelled():
        return not_in_time(seconds)
    error = task.exception()
    if error is None:
        return None
    return error.message if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"


async def persist(call: Callable[[], Awaitable[object]], seconds: float, *, name: str) -> str | None:
    """Retry `attempt` until `call` succeeds. Return the last reason, or None."""
    loop = asyncio.get_running_loop()
    # A call that hangs does not use up the time of the retries.
    until, most_s = loop.time() + seconds, max(seconds / _ATTEMPTS, _SHORTEST_ATTEMPT_S)

    async def attempt_once() -> str | None:
        return await attempt(call, min(until - loop.time(), most_s), name=name)

    repeated = AsyncRetrying(
        retry=retry_if_result(bool),
        wait=wait_exponential(_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
        stop=stop_before_delay(seconds),
        retry_error_callback=last_result,
    )
    return await repeated(attempt_once)


def last_result(state: RetryCallState) -> Any:
    """Return the last result: tenacity's `retry_error_callback`."""
    assert state.outcome is not None
    return state.outcome.result()


async def work_through(
    items: Iterator[_T], work: Callable[[_T], Awaitable[object]], *, at_once: int, seconds: float
) -> bool:
    """Do `work` for each of `items`, which may grow. Return True if done within `seconds`."""

    async def go_on() -> None:
        for item in items:
            await work(item)

    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as workers:
            for _ in range(at_once):
                workers.create_task(go_on())
    except TimeoutError:
        return False
    return True


async def ended(task: asyncio.Future[Any]) -> None:
    """Return when `task` is over. Cancelling the caller does not cancel it."""
    # Faster than `asyncio.wait`; each turn waits for two tasks.
    if task.done():
        return
    waiter: asyncio.Future[None] = task.get_loop().create_future()

    def wake(_: asyncio.Future[Any]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    task.add_done_callback(wake)
    try:
        await waiter
    finally:
        task.remove_done_callback(wake)


async def to_the_end(work: Awaitable[_T]) -> _T:
    """Await self-limiting `work` even if cancelled. Raise the cancellation afterwards."""
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await ended(task)
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation from task.exception()
    return task.result()


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, object], *, name: str) -> AsyncIterator[None]:
    """Run `work` during the block, then cancel and await it. Raises its error, unless cancelled."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(read_end)  # it may have failed while the caller is cancelled
    is_cancelled = False
    try:
        yield
    except asyncio.CancelledError:
        is_cancelled = True
        raise
    finally:
        task.cancel()
        await to_the_end(ended(task))
        if not is_cancelled and not task.cancelled():
            task.result()


def not_in_time(seconds: float) -> str:
    return f"did not answer within {seconds:.3g} s"


def read_end(task: asyncio.Future[Any]) -> None:
    """Retrieve an abandoned task's exception, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()
