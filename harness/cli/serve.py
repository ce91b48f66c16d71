"""`harness serve`: a session server of its own."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output
from harness.cli.folders import model_directory, tokenizer_directory

if TYPE_CHECKING:
    from harness.server.serving import RunningServer

_Engine = Annotated[
    str,
    typer.Option(
        "--engine", envvar="HARNESS_ENGINE", help="`local`, `scripted`, or NAME=URL[,URL] of running servers."
    ),
]
_Model = Annotated[
    str | None,
    typer.Option(
        envvar="HARNESS_MODEL",
        help="Weights of the local engine: catalogue name, folder or hub id.",
        show_default=False,
    ),
]
_Script = Annotated[
    Path | None, typer.Option(envvar="HARNESS_SCRIPT", help="What the scripted engine says.", show_default=False)
]
_ContinueEngines = Annotated[
    bool,
    typer.Option(
        "--continue-engines",
        envvar="HARNESS_CONTINUE_ENGINES",
        help="Continue engine servers that somebody who is gone has left paused, before they are tested.",
    ),
]


def serve(
    *,
    engine: _Engine = "local",
    model: _Model = None,
    tokenizer: options.Tokenizer = None,
    renderer: options.Renderer = "auto",
    script: _Script = None,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    store: options.Store = "memory",
    pause_timeout: options.PauseTimeout = 600.0,
    drain_grace: options.DrainGrace = 20.0,
    stop_grace: options.StopGrace = 5.0,
    admin_token: options.AdminToken = None,
    no_auth: options.NoAuth = False,
    open_paths: options.OpenPaths = False,
    matching: options.Matchings = None,
    limit: options.RequestLimits = None,
    idle_hours: options.IdleHours = 24.0,
    keep_days: options.KeepDays = 30.0,
    engine_key: options.EngineKey = "",
    continue_engines: _ContinueEngines = False,
    as_json: options.Json = False,
) -> None:
    """Serve sessions until Ctrl+C.

    Example: `harness serve --model smollm2-135m-instruct --store sessions.db`
    """
    import uvloop

    from harness.engines.base import ContinuesAtEntry
    from harness.engines.connect import open_engine
    from harness.server.serving import serve_forever
    from harness.store.connect import open_store
    from harness.telemetry.logging import configure_logging
    from harness.tokens.model_family import open_chat_tokenizer

    configure_logging()
    access = options.Access(admin_token, no_auth, open_paths)
    settings = options.server_settings(
        host,
        port,
        access,
        pause_timeout,
        matching,
        limit=limit,
        idle_hours=idle_hours,
        keep_days=keep_days,
        drain_grace=drain_grace,
        stop_grace=stop_grace,
    )
    model_dir = model_directory(model)
    tokens_dir = tokenizer_directory(tokenizer, model_dir)
    chat_tokenizer = open_chat_tokenizer(tokens_dir, renderer=renderer)
    provider = open_engine(
        engine, model_dir=model_dir, tokenizer=chat_tokenizer.tokenizer, script=script, engine_key=engine_key
    )
    if isinstance(provider, ContinuesAtEntry):
        provider.continues_at_entry = continue_engines

    def announce(running: "RunningServer") -> None:
        if as_json:
            _print(running, options.made_token(settings, access))
        else:
            output.say(f"serving sessions at {running.url}; Ctrl+C stops")
            options.say_who_may_ask(settings, access)

    uvloop.run(serve_forever(provider, chat_tokenizer, open_store(store), settings, announce))


def _print(running: "RunningServer", admin_token: str | None) -> None:
    output.print_json({"url": running.url, "sessions_restored": running.restored, "admin_token": admin_token})
    sys.stdout.flush()
