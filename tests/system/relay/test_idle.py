"""A proxy between the relay's ends that cuts idle connections after 180 s, and a turn of ten minutes; both in ticks."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path

import pytest

from harness.rollouts.relay.carrier import PING_S, SILENCES, CarriedStream, Carrier

TICK_S = 0.05
"""Stands for the time between two pings."""
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
IDLE_TICKS, TURN_TICKS = int(180 / PING_S), int(600 / PING_S)


class Impatient:
    """A proxy that cuts a connection after `IDLE_TICKS` without a byte."""

    def __init__(self, onward: Path) -> None:
        self._onward = onward
        self.cuts = 0

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        onward_reader, onward_writer = await asyncio.open_unix_connection(str(self._onward))
        idle = 0

        async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            nonlocal idle
            with suppress(ConnectionError):
                while data := await source.read(1 << 16):
                    idle = 0
                    target.write(data)

        ways = [asyncio.create_task(carry(reader, onward_writer)), asyncio.create_task(carry(onward_reader, writer))]
        while idle < IDLE_TICKS and not any(way.done() for way in ways):
            idle += 1
            await asyncio.sleep(TICK_S)
        self.cuts += idle == IDLE_TICKS
        for end in (writer, onward_writer):
            end.transport.abort()
        await asyncio.gather(*ways)


@pytest.mark.parametrize(("ping_s", "cuts"), [(TICK_S, 0), (PING_S, 1)], ids=["pings", "silence"])
async def test_pings_keep_a_proxy_from_cutting_a_long_turn(tmp_path: Path, ping_s: float, cuts: int) -> None:
    """The answer comes over the connection of the question; without pings in time there is none."""
    answering: list[asyncio.Task[None]] = []

    async def answer(stream: CarriedStream) -> None:
        question = await stream.read()
        for _ in range(TURN_TICKS):  # as the proxy counts them, whatever the clock says
            await asyncio.sleep(TICK_S)
        await stream.write(b"answer to " + question)

    outside = Carrier(lambda stream: answering.append(asyncio.create_task(answer(stream))), ping_s)
    inside, proxy = Carrier(ping_s=ping_s), Impatient(tmp_path / "relay.sock")
    serving: list[asyncio.Task[None]] = []

    def serve(work: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]) -> Serve:
        return lambda reader, writer: serving.append(asyncio.create_task(work(reader, writer)))

    async with (
        await asyncio.start_unix_server(serve(outside.carry), tmp_path / "relay.sock"),
        await asyncio.start_unix_server(serve(proxy.pass_on), tmp_path / "proxy.sock"),
    ):
        carrying = asyncio.create_task(inside.carry(*await asyncio.open_unix_connection(tmp_path / "proxy.sock")))
        stream = inside.open()
        await stream.write(b"question")
        asked = asyncio.create_task(stream.read())
        await asyncio.wait([carrying, asked], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert (asked.done(), carrying.done(), proxy.cuts) == (not cuts, bool(cuts), cuts)
        assert not asked.done() or asked.result() == b"answer to question"
        for task in (carrying, asked, *answering):
            task.cancel()
        await asyncio.gather(carrying, asked, *answering, *serving, return_exceptions=True)


async def test_ends_that_did_not_run_for_a_while_keep_their_connection(tmp_path: Path) -> None:
    """A machine that slept has heard nothing of the other end, which may have said enough."""
    outside, inside = Carrier(ping_s=TICK_S), Carrier(ping_s=TICK_S)
    serving: list[asyncio.Task[None]] = []

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.create_task(outside.carry(reader, writer)))

    async with await asyncio.start_unix_server(serve, tmp_path / "relay.sock"):
        carrying = asyncio.create_task(inside.carry(*await asyncio.open_unix_connection(tmp_path / "relay.sock")))
        while not (inside.is_carried and outside.is_carried):
            await asyncio.sleep(0)
        time.sleep((SILENCES + 2) * TICK_S)
        await asyncio.sleep(2 * TICK_S)
        assert (inside.is_carried, outside.is_carried) == (True, True)
        for task in (carrying, *serving):
            task.cancel()
        await asyncio.gather(carrying, *serving, return_exceptions=True)
