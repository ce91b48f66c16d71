"""`harness serve --shards N`: a front, and a session server process for each shard."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli import options

if TYPE_CHECKING:
    from harness.dialects.request_limits import RequestLimits
    from harness.gateway.shards.directory import ShardDirectory
    from harness.gateway.shards.supervisor import StartShard

_DIVIDED = ("sessions", "connections", "waiting_bytes", "row_bytes")
"""Server-wide limits, divided among shards; the others concern one request or session."""


def serve_shards(
    server: options.ServerOptions,
    shards: int,
    engine: str,
    own_options: Sequence[str],
    *,
    continue_engines: bool,
    as_json: bool,
) -> None:
    """Serve sessions with `shards` processes until Ctrl+C; `own_options` are those of `harness serve` only.

    Raises `ScenarioError` for an engine that processes cannot share, and for a store that is no directory.
    """
    import uvloop

    from harness.engines.connect import EngineName
    from harness.errors import ScenarioError
    from harness.machine.extras import require_package

    require_package("aiohttp", "run", "--shards")
    from harness.gateway.shards.serving import serve_shards_forever
    from harness.machine.descriptors import raise_descriptor_limit

    named = EngineName.parse(engine)
    if not (named.urls or named.plays_script):
        raise ScenarioError(
            f"--shards: processes cannot share the engine {engine!r}: start it as a server (`harness engine up"
            f" {named.kind}`) and name that one (`--engine NAME=URL`, as it is printed)"
        )
    folder = Path(server.store)
    if server.store == "memory" or folder.is_file():
        raise ScenarioError(f"--shards: expected --store DIR, a directory for their stores; got {server.store!r}")
    raise_descriptor_limit()
    settings = server.settings()

    def prepare(directory: "ShardDirectory") -> "StartShard":
        from harness.gateway.shards.supervisor import ShardCommand, shard_environment
        from harness.server.telemetry.logging import current_level

        level = current_level()
        environment = shard_environment(settings.admin_token, server.engine_key)
        limits = _divide(settings.limits, shards)

        def start(number: int, continues: bool) -> ShardCommand:
            port, store = directory.record.ports[number], directory.shard_store(number)
            shared = server.as_arguments(port=port, store=store, limit=limits)
            place = ["--shards", str(shards), "--shard", str(number), "--json"]
            place.append(f"--log-level={level}")
            awake = ["--continue-engines"] if continues else []
            command = [sys.executable, "-m", "harness", "serve", *own_options, *shared, *place, *awake]
            return ShardCommand(command, environment)

        return start

    def announce(url: str) -> None:
        said = f"serving sessions at {url} by {shards} shards; Ctrl+C stops"
        server.announce(url, settings, said, as_json=as_json, shards=shards)

    serving = serve_shards_forever(settings, folder, shards, prepare, announce, continue_engines=continue_engines)
    uvloop.run(serving)


def _divide(limits: "RequestLimits", shards: int) -> list[str]:
    numbers = asdict(limits)
    for name in _DIVIDED:
        numbers[name] = max(1, numbers[name] // shards)
    return [f"{name}={number}" for name, number in numbers.items()]
