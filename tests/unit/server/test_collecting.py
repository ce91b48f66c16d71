"""What is put together beside running sessions leaves them the event loop."""

import asyncio
import threading
import time

from harness.server.collecting import CollectingPlace


def burn() -> str:
    """Some processor time, and the name of the thread that had it."""
    began = time.thread_time()
    while time.thread_time() - began < 0.005:
        pass
    return threading.current_thread().name


async def has_to_wait(place: CollectingPlace) -> bool:
    """Whether somebody who wants the place has it only after others have got on."""
    others: list[str] = []

    async def take() -> str:
        async with place.taken():
            return "".join(others)

    taking = asyncio.create_task(take())
    asyncio.get_running_loop().call_soon(others.append, "others")
    return bool(await taking)


async def test_the_place_rests_while_turns_are_in_flight_and_only_then() -> None:
    """An abort, which has none, collects as fast as it can."""
    turns = 0
    place = CollectingPlace(lambda: turns)
    async with place.taken():
        assert await place.do(burn) != threading.current_thread().name

    assert not await has_to_wait(place)
    turns = 1
    assert await has_to_wait(place)


async def test_one_session_is_put_together_at_one_time() -> None:
    """However many are asked for; one that fails lets the next one in."""
    place, busy, most = CollectingPlace(lambda: 0), 0, 0

    def work() -> None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        burn()
        busy -= 1
        raise ValueError

    async def collect() -> None:
        async with place.taken():
            await place.do(work)

    found = await asyncio.gather(*(collect() for _ in range(8)), return_exceptions=True)

    assert ([type(each) for each in found], most) == ([ValueError] * 8, 1)
