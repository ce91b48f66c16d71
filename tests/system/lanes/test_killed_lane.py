"""A server that a fault of a scenario kills is gone as a whole, and comes back where it was."""

import asyncio

import httpx
import pytest

from harness.lab.lanes import LaneSpec, find_lanes
from harness.machine.process_group import members
from harness.suite.faults.seams import KillableLane


async def test_a_killed_server_comes_back_at_its_address(spec: LaneSpec) -> None:
    """Killed, none of its processes is left and nothing answers; started again, it has the same name."""
    said: list[str] = []
    async with KillableLane(spec, said.append) as server, httpx.AsyncClient() as http:
        (lane,) = find_lanes()
        await server.kill()
        assert (members(lane.group), find_lanes()) == ([], [])
        with pytest.raises(httpx.ConnectError):
            await http.get(lane.url)
        await server.start()

        assert (await http.post(f"{lane.url}/anything", json={})).status_code == 200
        (again,) = find_lanes()
        assert again.provider == lane.provider

    async with asyncio.timeout(60):
        while members(again.group):
            await asyncio.sleep(0.02)
    assert find_lanes() == []


async def test_a_server_that_stays_dead_is_no_trouble_at_the_end(spec: LaneSpec) -> None:
    async with KillableLane(spec, lambda _: None) as server:
        await server.kill()
        await server.kill()

    assert find_lanes() == []
