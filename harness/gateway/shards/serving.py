"""Entry point of a front and its shards.

Order of startup: the address, the directory with the front's holds, the shards (closed), the gate state for each shard.
Only then does the front accept requests. A failure before that leaves no process and a record that is not yet binding.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from harness.errors import ShardUnavailable
from harness.gateway.shards.directory import ShardDirectory
from harness.gateway.shards.front import Front
from harness.gateway.shards.shard_client import VERB_S, ShardClient, ShardClients
from harness.gateway.shards.supervisor import StartShard, Supervisor
from harness.machine.asgi import HangingUpServer, answering, listening, stop_at_signals
from harness.machine.http_bounds import ServerConnections
from harness.machine.log import get_logger
from harness.server.gatekeeper import Gatekeeper
from harness.server.serving import connection_bounds
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import SQLiteStore
from harness.server.telemetry.metrics import ServerMetrics
from server_patch.background import running

_TOLD_S = 30.0  # for all shards to get their first state
_STOP_MARGIN_S = 13.0  # beyond the grace of turns: engines hand over, stores close, a collector gets the rest

log = get_logger(__name__)

PrepareShards = Callable[[ShardDirectory], StartShard]
"""Returns the command that starts shards on the stores and ports of a directory."""


@asynccontextmanager
async def serve_shards(
    settings: ServerSettings, folder: Path, shards: int, prepare: PrepareShards, *, continue_engines: bool
) -> AsyncIterator[str]:
    """Serve a front and its shards within the block, and yield the front's address.

    `continue_engines`: see `Supervisor`. Raises `CannotListen`, `StoreError` or `ScenarioError` for an unavailable
    address or directory, `ShardUnavailable` if a shard does not start.
    """
    settings.check()
    directory = ShardDirectory(folder, shards)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listening(settings.host, settings.port))
        host, port = listener.getsockname()[:2]
        directory.prepare()
        store = await stack.enter_async_context(SQLiteStore(directory.front_store))
        directory.open(settings.host, settings.port)
        await asyncio.to_thread(directory.end_left_processes)
        directory.begin()
        metrics = ServerMetrics()
        gatekeeper = Gatekeeper(store, metrics, pause_timeout_s=settings.pause_timeout_s)
        await gatekeeper.restore()
        http = await stack.enter_async_context(_open_http())
        links = ShardClients([ShardClient(number, http, gatekeeper, directory, settings) for number in range(shards)])
        front = Front(links, gatekeeper, directory, metrics, settings)
        supervisor = Supervisor(
            links,
            directory,
            gatekeeper.gate,
            prepare(directory),
            stop_s=settings.stop_grace_s + _STOP_MARGIN_S,
            continue_engines=continue_engines,
        )
        await stack.enter_async_context(running(gatekeeper.expire_in_time()))
        await stack.enter_async_context(supervisor.keep_up())
        told = await links.ask(ShardClient.tell, _TOLD_S)
        if told.problems:
            raise ShardUnavailable("; ".join(told.problems))
        directory.note_served()
        for link in links:
            await stack.enter_async_context(running(link.keep_in_step()))
        await stack.enter_async_context(running(front.left_engines.wake_for_ever()))
        connections = ServerConnections(connection_bounds(settings), front.errors.refuse_connection)
        await stack.enter_async_context(running(connections.watch_for_ever()))
        await stack.enter_async_context(answering(HangingUpServer(front.app(), connections), listener))
        log.info("front_started", url=f"http://{host}:{port}", shards=[link.url for link in links])
        try:
            yield f"http://{host}:{port}"
        finally:
            await front.callers.send_away(grace_s=0.0)


async def serve_shards_forever(
    settings: ServerSettings,
    folder: Path,
    shards: int,
    prepare: PrepareShards,
    started: Callable[[str], None],
    *,
    continue_engines: bool,
) -> None:
    """Serve until SIGINT or SIGTERM; call `started` once every shard answers."""
    async with serve_shards(settings, folder, shards, prepare, continue_engines=continue_engines) as url:
        # Earlier signals had their default effect, and the watchdog ends the shards then.
        stop = stop_at_signals()
        started(url)
        await stop.wait()


def _open_http() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=VERB_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )
