"""`harness serve`: a session server of its own."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output
from harness.errors import ScenarioError

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
_Tokenizer = Annotated[
    Path | None,
    typer.Option(
        envvar="HARNESS_TOKENIZER",
        help="Folder with tokenizer and chat template.  [default: that of --model]",
        show_default=False,
    ),
]
_Script = Annotated[
    Path | None, typer.Option(envvar="HARNESS_SCRIPT", help="What the scripted engine says.", show_default=False)
]
_Host = Annotated[str, typer.Option(envvar="HARNESS_HOST")]
_Port = Annotated[int, typer.Option(envvar="HARNESS_PORT", min=0, max=65535, help="0 takes a free one.")]
_Store = Annotated[str, typer.Option(envvar="HARNESS_STORE", help="SQLite file that keeps the sessions, or `memory`.")]
_PauseTimeout = Annotated[
    float, typer.Option(envvar="HARNESS_PAUSE_TIMEOUT", min=0, help="Seconds a paused server holds a request.")
]
_AdminToken = Annotated[
    str | None,
    typer.Option(
        envvar="HARNESS_ADMIN_TOKEN", help="Needed to create and read sessions, when set.", show_default=False
    ),
]
_Matchings = Annotated[
    list[str] | None,
    typer.Option(
        envvar="HARNESS_MATCHING",
        metavar="MODULE:FUNCTION",
        help="Lets sessions choose this function to match replayed histories; may be repeated.",
        show_default=False,
    ),
]


def serve(
    *,
    engine: _Engine = "local",
    model: _Model = None,
    tokenizer: _Tokenizer = None,
    renderer: options.Renderer = "auto",
    script: _Script = None,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    store: _Store = "memory",
    pause_timeout: _PauseTimeout = 600.0,
    admin_token: _AdminToken = None,
    matching: _Matchings = None,
    as_json: options.Json = False,
) -> None:
    """Serve sessions until Ctrl+C.

    Example: `harness serve --model smollm2-135m-instruct --store sessions.db`
    """
    import uvloop

    from harness.engines.connect import open_engine
    from harness.server.serving import serve_forever
    from harness.server.settings import ServerSettings
    from harness.store.connect import open_store
    from harness.telemetry.logging import configure_logging
    from harness.tokens.opening import open_chat_tokenizer

    configure_logging()
    settings = ServerSettings(
        host=host,
        port=port,
        admin_token=admin_token,
        pause_timeout_s=pause_timeout,
        matchings=tuple(matching or ()),
    )
    settings.check()
    model_dir = _model_dir(model)
    tokens_dir = _tokenizer_dir(tokenizer, model_dir)
    chat_tokenizer = open_chat_tokenizer(tokens_dir, renderer=renderer)
    provider = open_engine(engine, model_dir=model_dir, tokenizer=chat_tokenizer.tokenizer, script=script)
    announce = _print_url if as_json else _say_url
    uvloop.run(serve_forever(provider, chat_tokenizer, open_store(store), settings, announce))


def _print_url(running: "RunningServer") -> None:
    output.print_json({"url": running.url, "sessions_restored": running.restored})
    sys.stdout.flush()


def _say_url(running: "RunningServer") -> None:
    output.say(f"serving sessions at {running.url}; Ctrl+C stops")


def _model_dir(model: str | None) -> Path | None:
    """The folder of the weights, fetched when they are in the catalogue."""
    if model is None:
        return None
    from harness.cli.download import open_download_progress
    from harness.models import resolve_model

    with open_download_progress(model) as progress:
        return resolve_model(model, progress=progress)


def _tokenizer_dir(tokenizer: Path | None, model_dir: Path | None) -> Path:
    """The folder of the tokenizer. Raises `ScenarioError` when none was named."""
    folder = tokenizer or model_dir
    if folder is None:
        raise ScenarioError("no tokenizer: expected --model NAME_OR_DIR, or --tokenizer DIR for a scripted engine")
    return folder
