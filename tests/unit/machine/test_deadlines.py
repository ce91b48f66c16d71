"""Waiting for what others wrote: no sandboxes are left behind, and no cancellation is lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from harness.machine.deadlines import Deadline, attempt, beside, ended

PATIENCE_S = 30


@asynccontextmanager
async def own_timeout(seconds: float) -> AsyncIterator[None]:
    with Deadline(seconds):
        yield


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise TimeoutError("of the block")


async def be_cancelled_too() -> None:
    asyncio.current_task().cancel()
    await wait_for_ever()


async def swallow() -> None:
    with suppress(asyncio.CancelledError):
        await wait_for_ever()


async def outlast_an_inner_one() -> None:
    async with asyncio.timeout(0):
        await wait_for_ever()


@pytest.mark.parametrize("timeout", [asyncio.timeout, own_timeout])
@pytest.mark.parametrize(
    ("seconds", "block", "end"),
    [
        (PATIENCE_S, lambda: asyncio.sleep(0), "None"),
        (0, wait_for_ever, "TimeoutError()"),
        (-1, wait_for_ever, "TimeoutError()"),
        (PATIENCE_S, fail, "TimeoutError('of the block')"),
        (PATIENCE_S, be_cancelled_too, "CancelledError()"),
        (0, be_cancelled_too, "CancelledError()"),
        (0, swallow, "None"),
        (PATIENCE_S, outlast_an_inner_one, "TimeoutError()"),
    ],
)
async def test_a_deadline_ends_a_block_as_that_of_the_library_does(
    timeout: Callable[[float], Any], seconds: float, block: Callable[[], Awaitable[object]], end: str
):
    """A cancellation from elsewhere stays one, and none of its own is left behind."""

    async def caller() -> str:
        try:
            async with timeout(seconds):
                await block()
        except (TimeoutError, asyncio.CancelledError) as error:
            return f"{error!r} {asyncio.current_task().cancelling()}"
        return f"None {asyncio.current_task().cancelling()}"

    said = await asyncio.create_task(caller())

    assert said == f"{end} {int(block is be_cancelled_too)}"


async def test_a_deadline_moves_until_it_has_passed():
    deadline = Deadline(None)

    async def move_and_wait() -> None:
        with deadline:
            deadline.move(PATIENCE_S)
            deadline.move()
            await wait_for_ever()

    with pytest.raises(TimeoutError):
        await move_and_wait()
    deadline.move()
    await asyncio.sleep(0)  # no second cancellation

    assert deadline.has_passed


async def test_a_deadline_that_is_due_interrupts_the_next_await():
    """Even one that other callbacks would end first."""

    async def move_and_go_on() -> None:
        with Deadline(PATIENCE_S) as deadline:
            deadline.move()
            await asyncio.sleep(0)

    with pytest.raises(TimeoutError):
        await move_and_go_on()


async def test_a_deadline_cannot_be_moved_behind_its_block():
    with Deadline(PATIENCE_S) as deadline:
        pass
    deadline.move()
    await asyncio.sleep(0)

    assert not deadline.has_passed


async def test_what_goes_on_beside_a_block_ends_with_it():
    """It has ended when the block is left, its own end included."""
    said: list[str] = []

    async def work() -> None:
        try:
            said.append("begun")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            said.append("ended")

    async with beside(work(), name="work"):
        await asyncio.sleep(0)
    said.append("left")

    assert said == ["begun", "ended", "left"]


async def test_a_cancellation_that_comes_while_the_work_ends_is_not_lost():
    """The caller is cancelled when the work has ended, and does nothing of what stands behind the block."""
    is_ending, may_end, said = asyncio.Event(), asyncio.Event(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await may_end.wait()
            said.append("ended")

    async def caller() -> None:
        async with beside(work(), name="work"):
            await asyncio.sleep(0)
        said.append("continued")

    running = asyncio.create_task(caller())
    async with asyncio.timeout(PATIENCE_S):
        await is_ending.wait()
        running.cancel()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait({running})

    assert (running.cancelled(), said) == (True, ["ended"])


async def test_a_failure_beside_a_block_is_raised_behind_it():
    said: list[str] = []

    async def work() -> None:
        raise ValueError("no weights")

    async def caller() -> None:
        async with beside(work(), name="work"):
            await asyncio.sleep(0)
            said.append("the end")

    with pytest.raises(ValueError, match="no weights"):
        await caller()

    assert said == ["the end"]


async def test_a_cancellation_counts_for_more_than_a_failure_beside_the_block():
    """A caller that is cancelled ends as cancelled: whoever did that waits for nothing else."""
    has_failed = asyncio.Event()

    async def work() -> None:
        has_failed.set()
        raise ValueError("no weights")

    async def caller() -> None:
        async with beside(work(), name="work"):
            await asyncio.Event().wait()

    running = asyncio.create_task(caller())
    async with asyncio.timeout(PATIENCE_S):
        await has_failed.wait()
        running.cancel()
        await asyncio.wait({running})

    assert running.cancelled()


async def test_whoever_waits_for_the_end_of_a_task_hears_nothing_of_it():
    """Of one that fails, one that is cancelled, and one that is over already."""

    async def fail() -> None:
        raise ValueError("it failed")

    failing, hanging = asyncio.create_task(fail()), asyncio.create_task(asyncio.Event().wait())
    hanging.cancel()

    await ended(failing)
    await ended(hanging)
    await ended(failing)

    assert isinstance(failing.exception(), ValueError)
    assert hanging.cancelled()


async def test_a_cancellation_of_whoever_waits_does_not_reach_the_task():
    """It continues, and others can wait for its end."""
    event = asyncio.Event()
    task = asyncio.create_task(event.wait())
    waiting = asyncio.create_task(ended(task))
    await asyncio.sleep(0)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not task.done()
    event.set()
    await ended(task)

    assert task.result()


@pytest.mark.parametrize(("seconds", "said"), [(0.0, []), (0.2, ["obeyed"])])
async def test_a_call_without_time_gets_none_to_obey_either(seconds: float, said: list[str]):
    """A sum of many such calls would come to more than the whole that has run out."""
    heard: list[str] = []

    async def obey_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            heard.append("obeyed")

    assert "did not answer" in str(await attempt(obey_slowly, seconds, name="slow"))
    assert heard == said
