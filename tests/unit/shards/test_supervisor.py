"""Which shards continue engines before they test them: processes that say that they answer, and do nothing else."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from harness.errors import EnginesHeld
from harness.server.gatekeeper import Gatekeeper
from harness.server.settings import ServerSettings
from harness.sessions.gate import Gate, Hold, HoldKind
from harness.shards.directory import ShardDirectory
from harness.shards.link import ShardLink
from harness.shards.shard_links import ShardLinks
from harness.shards.standing import ShardCounts
from harness.shards.supervisor import ShardCommand, Supervisor, shard_environment
from harness.store.memory import MemoryStore
from harness.telemetry.metrics import ServerMetrics
from tests.session_servers.served import eventually

ANSWERS = """print('{"url": "http://x"\\n}', flush=True); import time; time.sleep(600)"""
UPDATE = Hold("update", HoldKind.PAUSE, until=1e12, engines=True)


class Shards:
    """Two shards that a supervisor has up."""

    def __init__(self, links: ShardLinks, gate: Gate, directory: ShardDirectory) -> None:
        self.links = links
        self.gate = gate
        self.directory = directory
        self.started: list[tuple[int, bool]] = []
        """Number of each that was started, and whether it continues engines."""
        self.refused: list[int] = []
        """Those during whose start no hold could have had the engines."""

    def start(self, number: int, continues: bool) -> ShardCommand:
        """See `StartShard`."""
        self.started.append((number, continues))
        try:
            Gate(wakers=self.gate.wakers).place(UPDATE)
        except EnginesHeld:
            self.refused.append(number)
        return ShardCommand((sys.executable, "-S", "-c", ANSWERS), {})

    async def kill(self, number: int) -> tuple[int, bool]:
        """The shard that comes up in its place, as `started`."""
        process = self.directory.record.processes[number]
        assert process is not None
        before = len(self.started)
        os.kill(process.pid, signal.SIGKILL)
        await eventually(lambda: len(self.started) > before and bool(self.links.find(f"{number:02x}").url))
        return self.started[-1]


@asynccontextmanager
async def shards_up(folder: Path, *holds: Hold, continue_engines: bool) -> AsyncIterator[Shards]:
    """Two shards, started for the first time under these holds."""
    directory = ShardDirectory(folder, 2)
    directory.open("127.0.0.1", 0)
    gatekeeper = Gatekeeper(MemoryStore(), ServerMetrics(), pause_timeout_s=1.0)
    gate = gatekeeper.gate
    gate.restore(holds)
    gate.expire(1.0)
    async with aiohttp.ClientSession() as http:
        links = ShardLinks([ShardLink(n, http, gatekeeper, directory, ServerSettings()) for n in range(2)])
        shards = Shards(links, gate, directory)
        supervisor = Supervisor(links, directory, gate, shards.start, stop_s=5.0, continue_engines=continue_engines)
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
    """Not even for an operator: an update that goes on, and whose front was started again."""
    async with shards_up(tmp_path, UPDATE, continue_engines=True) as shards:
        assert sorted(shards.started) == [(0, False), (1, False)]


async def test_left_engines_are_continued_by_a_shard_that_begins_when_no_other_is_up(tmp_path: Path):
    """And no hold gets them meanwhile; as long as another one is up the front continues them through that."""
    async with shards_up(tmp_path, replace(UPDATE, until=0.0), continue_engines=False) as shards:
        first, refused = sorted(shards.started), sorted(shards.refused)
        again = await shards.kill(0)
        shards.links.find("01").counts = ShardCounts()
        beside_another = await shards.kill(0)
        shards.gate.place(replace(UPDATE, holder="the next one"))

    assert first == [(0, True), (1, True)]
    assert refused == [0, 1]
    assert again == (0, True)
    assert beside_another == (0, False)


def test_options_of_the_front_do_not_reach_shards_through_the_environment(monkeypatch: pytest.MonkeyPatch):
    """Each is told on its command line what it does."""
    monkeypatch.setenv("HARNESS_CONTINUE_ENGINES", "1")
    monkeypatch.setenv("HARNESS_SHARDS", "2")
    monkeypatch.setenv("HARNESS_STREAMING", "live")
    environment = shard_environment("token", "key")

    assert environment["HARNESS_STREAMING"] == "live"
    assert not {"HARNESS_CONTINUE_ENGINES", "HARNESS_SHARDS"} & environment.keys()
