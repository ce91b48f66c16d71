"""A front's link to a shard that does not do as it is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import httpx
import msgspec
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from harness.engines.scripted import ScriptedEngine
from harness.errors import ShardUnavailable
from harness.gateway.shards.directory import ShardDirectory
from harness.gateway.shards.shard import STATE_PATH, DesiredStateAnswer, ShardCounts, as_shard
from harness.gateway.shards.shard_client import ShardClient
from harness.server.app import SessionServer
from harness.server.gatekeeper import Gatekeeper
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from harness.server.telemetry.metrics import ServerMetrics
from harness.sessions.gate import HoldKind, HoldRequest, ReleaseRequest
from harness.sessions.paging import SessionStub
from harness.sessions.session import Session
from tests.builders import toy_template, toy_tokenizer, user
from tests.session_servers.scripted import canned_server, http_answer
from tests.session_servers.served import eventually


def link_to(url: str, folder: Path, http: aiohttp.ClientSession) -> tuple[ShardClient, Gatekeeper, ShardDirectory]:
    """The link of a front to the shard at `url`, with the front's gate and directory."""
    gatekeeper = Gatekeeper(MemoryStore(), ServerMetrics(), pause_timeout_s=1.0)
    directory = ShardDirectory(folder, 1)
    directory.open("127.0.0.1", 0)
    directory.record.ports[0] = int(url.rpartition(":")[2])
    link = ShardClient(0, http, gatekeeper, directory, ServerSettings())
    link.came_up()
    return link, gatekeeper, directory


class LosesAnswers:
    """A shard whose answers about its gate get lost, while `is_on`; it has done what it was told."""

    is_on = False

    @asynccontextmanager
    async def around(self, server: SessionServer) -> AsyncIterator[ASGIApp]:
        """The shard's application."""
        async with as_shard(server) as shard:

            async def app(scope: Scope, receive: Receive, send: Send) -> None:
                async def lose(message: Message) -> None:
                    del message

                await shard(scope, receive, lose if self.is_on and scope.get("path") == STATE_PATH else send)

            yield app


async def test_what_a_shard_did_is_counted_though_its_answer_was_lost(tmp_path: Path):
    """The turn that opening the gate released, and the session that a drain closed."""
    faulty = LosesAnswers()
    engine = ScriptedEngine(toy_tokenizer())
    async with (
        serve(engine, toy_template(), MemoryStore(), around=faulty.around) as shard,
        httpx.AsyncClient(base_url=shard.url, timeout=30) as agent,
        aiohttp.ClientSession() as http,
    ):
        link, gatekeeper, directory = link_to(shard.url, tmp_path, http)
        await link.tell()
        session = (await agent.post("/sessions")).json()["session_id"]
        gatekeeper.place(HoldRequest("holder"), HoldKind.PAUSE)
        await link.tell()
        asked = agent.post(f"/sessions/{session}/v1/chat/completions", json={"messages": [user("Hello.")]})
        turn = asyncio.create_task(asked)
        await eventually(lambda: shard.server.gatekeeper.held == 1)
        await gatekeeper.release(ReleaseRequest("holder"))
        for drain in (False, True):
            if drain:
                directory.note_drain()
            faulty.is_on = True
            with pytest.raises(ShardUnavailable):
                await link.tell()
            faulty.is_on = False
            await link.tell()
            assert (await turn).status_code == 200

    assert (link.released, link.sessions_closed) == (1, 1)


async def test_a_shard_that_stands_as_somebody_else_told_it_does_not_serve(tmp_path: Path):
    """Its answer says which telling is in force; the line of the front says what to do."""
    elsewhere = msgspec.json.encode(DesiredStateAnswer("another", 10**18, ShardCounts()))
    async with canned_server(http_answer(200, elsewhere)) as shard, aiohttp.ClientSession() as http:
        link, _, _ = link_to(shard.url, tmp_path, http)
        with pytest.raises(ShardUnavailable, match=r"telling 10{18} of 'another'.*kill the shard"):
            await link.tell()

        assert link.load is None


class SlowStore(MemoryStore):
    async def set_phase(self, session: Session | SessionStub) -> None:
        await asyncio.sleep(0.3)
        await super().set_phase(session)


async def test_a_drain_that_is_told_again_while_it_runs_counts_once(tmp_path: Path) -> None:
    """The front gives up on a slow shard, and tells it again."""
    engine = ScriptedEngine(toy_tokenizer())
    async with (
        serve(engine, toy_template(), SlowStore(), around=as_shard) as shard,
        httpx.AsyncClient(base_url=shard.url, timeout=30) as agent,
        aiohttp.ClientSession() as http,
    ):
        link, _, directory = link_to(shard.url, tmp_path, http)
        await link.tell()
        for _ in range(3):
            await agent.post("/sessions")
        directory.note_drain()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await link.tell()
        await link.tell()
        await link.tell()
        assert link.sessions_closed == 3
