"""How shards are started and end: processes that say that they answer, and do nothing else."""

import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from harness.errors import EnginesHeld
from harness.gateway.shards.directory import ShardDirectory
from harness.gateway.shards.shard import ShardCounts
from harness.gateway.shards.shard_client import ShardClient, ShardClients
from harness.gateway.shards.supervisor import ShardCommand, Supervisor, shard_environment
from harness.server.gatekeeper import Gatekeeper
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from harness.server.telemetry.metrics import ServerMetrics
from harness.sessions.gate import Gate, Hold, HoldKind
from tests.processes.family import is_running
from tests.session_servers.served import eventually

ANSWERS = r"""
import os, signal, time

def end_slowly(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.close(1)

signal.signal(signal.SIGUSR1, end_slowly)
print('{"url": "http://x"\n}', flush=True)
while True:
    time.sleep(600)
"""
UPDATE = Hold("update", HoldKind.PAUSE, until=1e12, engines=True)


class Shards:
    """Two shards that a supervisor has up."""

    def __init__(self, links: ShardClients, gate: Gate, directory: ShardDirectory) -> None:
        self.links = links
        self.gate = gate
        self.directory = directory
        self.started: list[tuple[int, bool]] = []
        """Number of each that was started, and whether it continues engines."""
        self.refused: list[int] = []
        """Those during whose start no hold could have had the engines."""

    def start(self, number: int, continues: bool) -> ShardCommand:
        self.started.append((number, continues))
        try:
            Gate(wakers=self.gate.wakers).place(UPDATE)
        except EnginesHeld:
            self.refused.append(number)
        return ShardCommand((sys.executable, "-S", "-c", ANSWERS), {})

    @property
    def pids(self) -> list[int]:
        """Of the processes, as the record has them."""
        return [process.pid for process in self.directory.record.processes if process is not None]

    async def kill(self, number: int) -> tuple[int, bool]:
        """The shard that comes up in its place, as `started`."""
        before = len(self.started)
        os.kill(self.pids[number], signal.SIGKILL)
        await eventually(lambda: len(self.started) > before and bool(self.links.find(f"{number:02x}").url))
        return self.started[-1]


@asynccontextmanager
async def shards_up(folder: Path, *holds: Hold, continue_engines: bool = False) -> AsyncIterator[Shards]:
    """Two shards, started for the first time under these holds."""
    directory = ShardDirectory(folder, 2)
    directory.prepare()
    directory.open("127.0.0.1", 0)
    gatekeeper = Gatekeeper(MemoryStore(), ServerMetrics(), pause_timeout_s=1.0)
    gate = gatekeeper.gate
    gate.restore(holds)
    gate.expire(1.0)
    async with aiohttp.ClientSession() as http:
        links = ShardClients([ShardClient(n, http, gatekeeper, directory, ServerSettings()) for n in range(2)])
        shards = Shards(links, gate, directory)
        supervisor = Supervisor(links, directory, gate, shards.start, stop_s=60.0, continue_engines=continue_engines)
        async with supervisor.keep_up():
            yield shards


async def test_an_operator_who_wants_engines_continued_means_the_first_start(tmp_path: Path):
    """A shard that dies later is started again under somebody who may have paused them since."""
    async with shards_up(tmp_path, continue_engines=True) as shards:
        first = sorted(shards.started)
        again = await shards.kill(0)

    assert first == [(0, True), (1, True)]
    assert again == (0, False)


async def test_engines_that_a_hold_covers_are_not_continued(tmp_path: Path):
    """Not even for an operator: an update that continues, and whose front was started again."""
    async with shards_up(tmp_path, UPDATE, continue_engines=True) as shards:
        assert sorted(shards.started) == [(0, False), (1, False)]


async def test_left_engines_are_continued_by_a_shard_that_begins_when_no_other_is_up(tmp_path: Path):
    """And no hold gets them meanwhile; as long as another one is up the front continues them through that."""
    async with shards_up(tmp_path, replace(UPDATE, until=0.0)) as shards:
        first, refused = sorted(shards.started), sorted(shards.refused)
        again = await shards.kill(0)
        shards.links.find("01").counts = ShardCounts()
        beside_another = await shards.kill(0)
        shards.gate.place(replace(UPDATE, holder="the next one"))

    assert first == [(0, True), (1, True)]
    assert refused == [0, 1]
    assert again == (0, True)
    assert beside_another == (0, False)


async def test_a_shard_that_is_ending_is_asked_nothing_any_more(tmp_path: Path):
    """Its port may be somebody else's by then; this one takes its time to end."""
    async with shards_up(tmp_path) as shards:
        ending = shards.pids[0]
        os.kill(ending, signal.SIGUSR1)
        await eventually(lambda: not shards.links.find("00").url)
        is_there = is_running(ending)
        os.kill(ending, signal.SIGKILL)

    assert is_there


async def test_a_shard_comes_up_though_its_process_cannot_be_noted(tmp_path: Path):
    """The record is for a front that comes after; the shard serves now."""
    async with shards_up(tmp_path / "shards") as shards:
        shutil.rmtree(tmp_path / "shards")
        await shards.kill(0)
        assert len(shards.started) == 3


def test_options_of_the_front_do_not_reach_shards_through_the_environment(monkeypatch: pytest.MonkeyPatch):
    """Each is told on its command line what it does."""
    monkeypatch.setenv("HARNESS_CONTINUE_ENGINES", "1")
    monkeypatch.setenv("HARNESS_SHARDS", "2")
    monkeypatch.setenv("HARNESS_STREAMING", "live")
    environment = shard_environment("token", "key")

    assert environment["HARNESS_STREAMING"] == "live"
    assert not {"HARNESS_CONTINUE_ENGINES", "HARNESS_SHARDS"} & environment.keys()
