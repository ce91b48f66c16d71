"""A front's link to a shard that does not do as it is told."""

from pathlib import Path

import aiohttp
import msgspec
import pytest

from harness.errors import ShardUnavailable
from harness.gateway.shards.desired_state import DesiredStateAnswer, ShardCounts
from harness.gateway.shards.directory import ShardDirectory
from harness.gateway.shards.shard_client import ShardClient
from harness.server.gatekeeper import Gatekeeper
from harness.server.settings import ServerSettings
from harness.server.store.memory import MemoryStore
from harness.server.telemetry.metrics import ServerMetrics
from tests.session_servers.scripted import canned_server, http_answer


async def test_a_shard_that_stands_as_somebody_else_told_it_does_not_serve(tmp_path: Path):
    """Its answer says which telling is in force; the line of the front says what to do."""
    elsewhere = msgspec.json.encode(DesiredStateAnswer("another", 10**18, ShardCounts()))
    async with canned_server(http_answer(200, elsewhere)) as shard, aiohttp.ClientSession() as http:
        gatekeeper = Gatekeeper(MemoryStore(), ServerMetrics(), pause_timeout_s=1.0)
        directory = ShardDirectory(tmp_path, 1)
        directory.open("127.0.0.1", 0)
        directory.record.ports[0] = int(shard.url.rpartition(":")[2])
        link = ShardClient(0, http, gatekeeper, directory, ServerSettings())
        link.came_up()
        with pytest.raises(ShardUnavailable, match=r"telling 10{18} of 'another'.*kill it"):
            await link.tell()

        assert link.load is None
