"""A lane begins when its server generates and ends as a whole, whoever dies first."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from harness.errors import LaneError
from harness.lab.lanes import INSTALLED, LaneSpec, down, find_lanes, open_lane, start_lane
from harness.lab.lanes.lane import until_it_generates
from harness.machine.process_group import members
from tests.session_servers.served import eventually


async def _until_gone(group: int) -> None:
    await eventually(lambda: not members(group))


async def _is_busy(url: str) -> bool:
    async with httpx.AsyncClient(timeout=30) as http:
        with suppress(httpx.TransportError):
            return (await http.post(f"{url}/generate", json={})).status_code == 503
    return False


async def test_a_lane_serves_for_the_time_of_its_block(spec: LaneSpec) -> None:
    """Inside it answers and is listed; afterwards no process, no state, and the log is still there."""
    async with open_lane(spec) as lane, httpx.AsyncClient(timeout=30) as http:
        assert (await http.post(f"{lane.url}/anything", json={})).status_code == 200
        assert (find_lanes(), lane.holder, len(lane.processes)) == ([lane], os.getpid(), 2)

    assert (members(lane.group), find_lanes()) == ([], [])
    assert "started as" in lane.log.read_text()


async def test_its_port_is_none_that_the_system_gives_to_others(spec: LaneSpec) -> None:
    """A real engine binds it a minute after the choice; Linux gives others those from 32768 on."""
    for _ in range(3):
        async with open_lane(spec) as lane:
            assert int(lane.url.rpartition(":")[2]) < 32_768


async def test_where_no_port_can_be_used_the_reason_is_said(spec: LaneSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(errno.EACCES, f"no port for you, not even {address}")

    monkeypatch.setattr(socket, "socket", Refusing)
    with pytest.raises(LaneError, match="no port for you"):
        await start_lane(spec)


async def test_the_block_may_fail(spec: LaneSpec) -> None:
    """An error inside is the error outside, and the server ends."""
    with pytest.raises(ZeroDivisionError):
        async with open_lane(spec) as lane:
            _ = 1 / 0

    assert members(lane.group) == []


async def test_a_server_that_dies_while_it_starts_is_reported_with_its_last_words(spec: LaneSpec) -> None:
    """The message has the end of the log, where the rest is, and what to do."""
    with pytest.raises(LaneError) as caught:
        async with open_lane(replace(spec, env={"FAKE_ENGINE": "die"})):
            pass

    for part in ("ended while it started", "correct or remove it", "server.log", "arguments: --no-such-flag"):
        assert part in caught.value.message
    assert find_lanes() == []


async def test_a_server_that_never_generates_is_ended_at_the_deadline(spec: LaneSpec) -> None:
    with pytest.raises(LaneError, match="did not generate a token within 1 s"):
        async with open_lane(replace(spec, env={"FAKE_ENGINE": "busy"}), deadline_s=1):
            pass

    assert find_lanes() == []


async def test_starting_can_be_cancelled(spec: LaneSpec) -> None:
    """While its server answers that it is busy, which a deadline would have in its error."""
    starting = asyncio.create_task(start_lane(replace(spec, env={"FAKE_ENGINE": "busy"})))
    async with asyncio.timeout(60):
        while not (lanes := find_lanes()):
            await asyncio.sleep(0.02)
        while not await _is_busy(lanes[0].url):
            await asyncio.sleep(0.1)
    with pytest.raises(LaneError, match=r"did not generate a token within 5 s, its last answer was 503"):
        await until_it_generates(lanes[0], deadline_s=5)
    starting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await starting
    assert (members(lanes[0].group), find_lanes()) == ([], [])


async def test_a_lane_dies_with_the_program_that_opened_it(installed: Path, weights: Path) -> None:
    """Even when that is killed with SIGKILL; its children go too."""
    program = (
        "import asyncio, sys; from pathlib import Path; from harness.lab.lanes import *\n"
        "async def main():\n"
        f"    async with open_lane(LaneSpec(LaneEngine.VLLM, Path({str(weights)!r}))) as lane:\n"
        "        print(lane.group, flush=True); await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        group = int(await asyncio.to_thread(owner.stdout.readline))
        assert len(members(group)) == 2
        owner.send_signal(signal.SIGKILL)
    await _until_gone(group)

    assert find_lanes() == []


async def test_a_port_that_is_taken_is_refused_before_anything_starts(spec: LaneSpec) -> None:
    """By another lane of the engine, or by a stranger."""
    async with open_lane(spec) as lane:
        taken = replace(spec, port=int(lane.url.rpartition(":")[2]))
        with pytest.raises(LaneError, match="is already running"):
            await start_lane(taken)
        other = next(engine for engine in INSTALLED if engine != spec.engine)
        with pytest.raises(LaneError, match="cannot be used"):
            await start_lane(replace(taken, engine=other))


async def test_down_ends_nothing_but_the_lane(spec: LaneSpec) -> None:
    """A process that came to the number of a lane that died is left alone, and the state goes."""
    lane = await start_lane(spec)
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        pretended = replace(lane.processes[0], pid=stranger.pid)
        stale = replace(lane, group=stranger.pid, processes=(pretended,))
        assert down(stale) is False
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
        assert (down(lane), down(lane)) == (True, False)


async def test_down_ends_what_a_dead_server_left_behind(spec: LaneSpec) -> None:
    """The first process is gone, its child is not: the group is still the lane's."""
    lane = await start_lane(spec)
    os.kill(lane.pid, signal.SIGKILL)

    assert (find_lanes(), down(lane), members(lane.group)) == ([lane], True, [])


def test_a_state_that_cannot_be_read_is_named(cache: Path) -> None:
    """Of another version of the harness, for example: its server may run, so nobody forgets it."""
    state = cache / "engines" / "lanes" / "vllm-8100" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"name": "vllm-8100"}')

    with pytest.raises(LaneError, match=r"vllm-8100/state\.json: .* end the server .* remove the file"):
        find_lanes()
