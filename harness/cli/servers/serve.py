"""`harness serve`: a session server."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options

if TYPE_CHECKING:
    from harness.server.serving import RunningServer

_Engine = Annotated[
    str, options.option("HARNESS_ENGINE", "`local`, `scripted`, or NAME=URL[,URL] of running servers.", "--engine")
]
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
    options.option(
        "HARNESS_SHARDS", "Number of processes behind one address; --store is their directory.", min=1, max=256
    ),
]
_Shard = Annotated[int | None, typer.Option(hidden=True, help="The number of the shard that this process is.")]


@options.takes_server_options
def serve(
    *,
    engine: _Engine = "local",
    model: _Model = None,
    script: _Script = None,
    server: options.ServerOptions,
    continue_engines: _ContinueEngines = False,
    shards: _Shards = None,
    shard: _Shard = None,
    as_json: options.Json = False,
) -> None:
    """Serve sessions until Ctrl+C.

    Examples: `harness serve --engine scripted`, `harness serve --model smollm2-135m-instruct --store sessions.db`
    """
    if shards is not None and shard is None:
        from harness.cli.servers.shards import serve_shards

        if model is not None:
            from harness.cli.download import fetch

            fetch(model)  # once, before all shards want it
        own = {"engine": engine, "model": model, "script": script}
        arguments = [f"--{name}={value}" for name, value in own.items() if value is not None]
        serve_shards(server, shards, engine, arguments, continue_engines=continue_engines, as_json=as_json)
        return
    gc.disable()  # for now: hardly anything of what is imported and read is garbage
    import uvloop

    from harness.cli.download import fetch
    from harness.engines.base import ContinuesAtEntry
    from harness.engines.connect import EngineName, open_engine
    from harness.engines.teachers import check_teachers
    from harness.lab.models.small_tokenizer import small_tokenizer
    from harness.machine.descriptors import raise_descriptor_limit
    from harness.machine.memory import settle
    from harness.server.serving import Around, alone, serve_forever
    from harness.server.store.connect import open_store

    raise_descriptor_limit()
    settings = server.settings()
    check_teachers(settings.teachers, engine)
    model_dir = None if model is None else fetch(model)
    if model_dir is None and server.tokenizer is None and EngineName.parse(engine).plays_script:
        model_dir = small_tokenizer()  # a script has no model, whose tokenizer it could be
    chat_tokenizer = server.open_tokenizer(model_dir)
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
        from harness.gateway.router.engine_verbs import with_verbs

        around = with_verbs(NativeServer(provider, chat_tokenizer.tokenizer, model_dir or Path()), settings)
    uvloop.run(serve_forever(provider, chat_tokenizer, open_store(server.store), settings, announce, around=around))
