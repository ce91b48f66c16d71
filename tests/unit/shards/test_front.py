"""A front with one shard that serves and one that is being started: what owners and controllers are answered."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from starlette.applications import Starlette
from starlette.routing import Route

from harness.engines.scripted import ScriptedEngine
from harness.gateway.shards.directory import ShardDirectory
from harness.gateway.shards.front import Front
from harness.gateway.shards.shard import ShardCounts
from harness.gateway.shards.shard_client import ShardClient, ShardClients
from harness.server.app import SessionServer
from harness.server.gatekeeper import Gatekeeper
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from harness.server.telemetry.metrics import ServerMetrics
from tests.builders import toy_template, turn_service
from tests.fake_engines.providers import toy_tokenizer
from tests.session_servers.asgi_client import Exchange
from tests.session_servers.scripted import SAY_NOTHING, canned_server, http_answer
from tests.session_servers.served import eventually


@asynccontextmanager
async def fronted(
    folder: Path, shard_url: str, settings: ServerSettings
) -> AsyncIterator[tuple[Starlette, ShardClient]]:
    """The front, and the link to the shard that serves at that address."""
    metrics = ServerMetrics()
    gatekeeper = Gatekeeper(MemoryStore(), metrics, pause_timeout_s=1.0)
    directory = ShardDirectory(folder, 2)
    directory.open("127.0.0.1", 0)
    directory.record.ports[0] = int(shard_url.rpartition(":")[2])
    async with aiohttp.ClientSession() as http:
        links = ShardClients([ShardClient(number, http, gatekeeper, directory, settings) for number in range(2)])
        link = links.find("00")
        link.came_up()
        link.counts = ShardCounts()
        yield Front(links, gatekeeper, directory, metrics, settings).app(), link


def routes_of(app: Starlette) -> set[tuple[str, str]]:
    """Each method of each path, less those of model calls."""
    return {
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route) and "/v1/" not in route.path and "/models/" not in route.path
        for method in route.methods or ()
    }


async def test_a_front_has_the_routes_of_a_session_server(tmp_path: Path):
    """All but model calls, which it sends to the session's shard."""
    server = SessionServer(turn_service(ScriptedEngine(toy_tokenizer()), toy_template(), MemoryStore()))
    async with canned_server(SAY_NOTHING) as shard, fronted(tmp_path, shard.url, ServerSettings()) as (front, _):
        assert routes_of(front) == routes_of(server.app())


async def test_a_session_whose_owner_left_before_its_answer_is_deleted(tmp_path: Path):
    """The shard may have made it; its id is noted, and nobody is asked to make another one."""
    async with canned_server(SAY_NOTHING) as shard, fronted(tmp_path, shard.url, ServerSettings()) as (front, link):
        owner = Exchange(front, "POST", "/sessions")
        await eventually(lambda: shard.requests == ["POST /sessions"])
        owner.leave()
        await asyncio.wait_for(owner.task, 60)

        assert [each[:2] for each in link.orphans] == ["00"]
        assert shard.requests == ["POST /sessions"]


async def test_the_public_name_is_that_of_the_front_with_the_port_of_the_shard(tmp_path: Path):
    """As a session server puts it before the ids of its own sessions."""
    settings = ServerSettings(public_url="https://agents.example:8443/harness/")
    made = http_answer(200, b'{"api_key": "sk"}')
    async with canned_server(made) as shard, fronted(tmp_path, shard.url, settings) as (front, link):
        owner = Exchange(front, "POST", "/sessions")
        await asyncio.wait_for(owner.task, 60)
        assert owner.answer is not None
        base_url = owner.answer.json()["base_url"]

        assert base_url.startswith(f"https://agents.example:{link.port}/harness/sessions/00")


async def test_a_shard_that_does_not_say_what_its_workers_serve_is_a_line(tmp_path: Path):
    """It may have fenced some, and the others do not know."""
    said = http_answer(200, b'{"version": 1, "serving": {"a": "1"}, "fenced": {}}')
    async with canned_server(said) as shard, fronted(tmp_path, shard.url, ServerSettings()) as (front, _):
        controller = Exchange(front, "POST", "/sessions/weights", b'{"version": 1}')
        await asyncio.wait_for(controller.task, 60)
        assert controller.answer is not None

        assert controller.answer.json()["serving"] == {"a": "1"}
        assert controller.answer.json()["problems"] == ["shard 1 is being started"]


async def test_times_of_turns_are_asked_of_the_shard_that_has_the_session(tmp_path: Path):
    """Of the other one it is a line that it did not answer, where it was asked; a front knows its holds itself."""
    here, there = "00" + "a" * 30, "01" + "b" * 30
    answer = {"now": 1.0, "times": {here: [[0, 1.0, 2.0, "completed"]]}, "left_off": ["00" + "c" * 30]}
    said = http_answer(200, answer)
    async with canned_server(said) as shard, fronted(tmp_path, shard.url, ServerSettings()) as (front, _):
        both = Exchange(front, "GET", f"/sessions/times?from={here}:0&from={there}:3")
        holds = Exchange(front, "GET", "/sessions/holds")
        await asyncio.wait_for(asyncio.gather(both.task, holds.task), 10)
        assert both.answer is not None
        assert holds.answer is not None

    assert shard.requests == [f"GET /sessions/times?from={here}:0"]
    assert both.answer.json()["times"] == {here: [[0, 1.0, 2.0, "completed"]]}
    assert both.answer.json()["left_off"] == answer["left_off"]
    assert both.answer.json()["problems"] == ["shard 1 is being started"]
    assert holds.answer.json()["holds"] == []
