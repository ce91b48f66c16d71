"""`harness serve`: a session server, or a front and its shards."""

import gc
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options
from harness.errors import ScenarioError
from harness.machine.extras import require_package

if TYPE_CHECKING:
    from harness.dialects.request_limits import RequestLimits
    from harness.gateway.shards.directory import ShardDirectory
    from harness.gateway.shards.supervisor import StartShard
    from harness.server.serving import RunningServer
    from harness.tokens.chat_tokenizer import ChatTokenizer

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
    """Serve sessions with `shards` processes until Ctrl+C; `own_options` are for `harness serve` only.

    Raises `ScenarioError` for an engine that processes cannot share, and for a store that is no directory.
    """
    import uvloop

    from harness.engines.connect import EngineName

    require_package("aiohttp", "run", "--shards")
    from harness.gateway.shards.serving import serve_shards_forever
    from harness.machine.this_process import raise_descriptor_limit

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


_Engine = Annotated[str, options.option("HARNESS_ENGINE", "`local`, `scripted`, or NAME=URL[,URL] of running servers.")]
_Model = Annotated[
    str | None, options.option("HARNESS_MODEL", "Weights of the local engine: catalogue name, folder or hub id.")
]
_Script = Annotated[Path | None, options.option("HARNESS_SCRIPT", "The answers of the scripted engine.")]
_ContinueEngines = Annotated[
    bool,
    options.option(
        "HARNESS_CONTINUE_ENGINES",
        "Continue engine servers that were left paused, before they are tested.",
        "--continue-engines",
    ),
]
_Shards = Annotated[
    int | None,
    options.option("HARNESS_SHARDS", "Processes behind one address; --store is their directory.", min=1, max=256),
]
_Strict = Annotated[
    bool, options.option("HARNESS_STRICT", "Refuse a model family that loses tools or tool calls.", "--strict")
]
_Shard = Annotated[int | None, typer.Option(hidden=True, help="Shard number of this process.")]


@options.takes_server_options
def serve(
    *,
    engine: _Engine = "local",
    model: _Model = None,
    script: _Script = None,
    server: options.ServerOptions,
    continue_engines: _ContinueEngines = False,
    strict: _Strict = False,
    shards: _Shards = None,
    shard: _Shard = None,
    as_json: options.Json = False,
) -> None:
    """Serve sessions until Ctrl+C.

    Examples: `harness serve --engine scripted`, `harness serve --model smollm2-135m-instruct --store sessions.db`
    """
    if shards is not None and shard is None:
        model_dir = _fetch(engine, model, server)  # once, before all shards want it
        if strict:
            _require_whole(server.open_tokenizer(model_dir))
        own = {"engine": engine, "model": model, "script": script}
        arguments = [f"--{name}={value}" for name, value in own.items() if value is not None]
        serve_shards(server, shards, engine, arguments, continue_engines=continue_engines, as_json=as_json)
        return
    gc.disable()  # for now: hardly anything of what is imported and read is garbage
    import uvloop

    from harness.engines.base import ContinuesAtEntry
    from harness.engines.connect import EngineName, open_engine
    from harness.engines.teachers import check_teachers
    from harness.machine.this_process import raise_descriptor_limit, settle
    from harness.server.serving import Around, alone, serve_forever
    from harness.server.store.sqlite import open_store

    raise_descriptor_limit()
    settings = server.settings()
    check_teachers(settings.teachers, engine)
    model_dir = _fetch(engine, model, server)
    chat_tokenizer = server.open_tokenizer(model_dir)
    if strict:
        _require_whole(chat_tokenizer)
    provider = open_engine(
        engine, model_dir=model_dir, tokenizer=chat_tokenizer.tokenizer, script=script, engine_key=server.engine_key
    )
    if isinstance(provider, ContinuesAtEntry):
        provider.continues_at_entry = continue_engines

    def announce(running: "RunningServer") -> None:
        settle()  # the sessions that were restored stay, too
        said = f"serving sessions at {running.url}; Ctrl+C stops"
        server.announce(running.url, settings, said, as_json=as_json, sessions_restored=running.restored)

    around: Around = alone
    if shard is not None and shards is not None:
        from harness.gateway.shards.shard import as_shard
        from harness.machine.log import bind
        from harness.sessions.shard_ids import ShardPlace

        bind(shard=shard)
        settings, around = replace(settings, shard=ShardPlace(shard, shards)), as_shard
    elif not EngineName.parse(engine).urls:
        from harness.engines.sglang_server import NativeServer
        from harness.gateway.router.trainer_verbs import with_verbs

        around = with_verbs(NativeServer(provider, chat_tokenizer.tokenizer, model_dir or Path()), settings)
    uvloop.run(serve_forever(provider, chat_tokenizer, open_store(server.store), settings, announce, around=around))


def _fetch(engine: str, model: str | None, server: options.ServerOptions) -> Path | None:
    from harness.cli.download import fetch
    from harness.engines.connect import EngineName
    from harness.lab.models.tokenizer_files import small_tokenizer

    if model is not None:
        return fetch(model)
    is_script = server.tokenizer is None and EngineName.parse(engine).plays_script
    return small_tokenizer() if is_script else None  # a script has no model, whose tokenizer it could be


def _require_whole(chat_tokenizer: "ChatTokenizer") -> None:
    """Raise `ScenarioError` with the reasons why tools or calls get lost."""
    if faults := chat_tokenizer.describe().faults:
        raise ScenarioError(f"--strict: expected a model family that loses nothing; {'; '.join(faults)}")
