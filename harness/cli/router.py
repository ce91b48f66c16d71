"""`harness router`: an SGLang router that also serves sessions."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output
from harness.cli.folders import model_directory, tokenizer_directory

if TYPE_CHECKING:
    from harness.router.gateway_program import GatewayProgram
    from harness.server.serving import RunningServer
    from server_patch.router import Gateway

_WorkerUrls = Annotated[
    str,
    typer.Option(
        envvar="HARNESS_WORKER_URLS",
        metavar="URL[,URL]",
        help="Workers of a gateway to start; more can be added to it later.",
        show_default=False,
    ),
]
_RouterUrl = Annotated[
    str | None, typer.Option(envvar="HARNESS_ROUTER_URL", help="A gateway that runs already.", show_default=False)
]
_Gateway = Annotated[
    str, typer.Option(envvar="HARNESS_GATEWAY", help="What to start: `smg`, or the restricted `sglang-router`.")
]
_GatewayArguments = Annotated[
    str, typer.Option(envvar="HARNESS_GATEWAY_ARGS", help="More arguments for the gateway.", show_default=False)
]
_GatewayLog = Annotated[
    Path | None, typer.Option(envvar="HARNESS_GATEWAY_LOG", help="Keeps the gateway's output.", show_default=False)
]
_Model = Annotated[
    str | None,
    typer.Option(
        envvar="HARNESS_MODEL", help="What the workers serve: catalogue name, folder or hub id.", show_default=False
    ),
]
_Limit = Annotated[
    int, typer.Option(envvar="HARNESS_WORKER_LIMIT", min=1, help="Session requests that one worker has at most.")
]
_QueueTimeout = Annotated[
    float, typer.Option(envvar="HARNESS_QUEUE_TIMEOUT", min=0, help="Seconds a session request waits for a worker.")
]
_StartTimeout = Annotated[
    float, typer.Option(envvar="HARNESS_START_TIMEOUT", min=0, help="Seconds to wait for a first worker.")
]


def router(
    *,
    worker_urls: _WorkerUrls = "",
    router_url: _RouterUrl = None,
    gateway: _Gateway = "smg",
    gateway_args: _GatewayArguments = "",
    gateway_log: _GatewayLog = None,
    model: _Model = None,
    tokenizer: options.Tokenizer = None,
    renderer: options.Renderer = "auto",
    worker_limit: _Limit = 256,
    queue_timeout: _QueueTimeout = 600.0,
    start_timeout: _StartTimeout = 600.0,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    store: options.Store = "memory",
    pause_timeout: options.PauseTimeout = 600.0,
    drain_grace: options.DrainGrace = 20.0,
    stop_grace: options.StopGrace = 5.0,
    admin_token: options.AdminToken = None,
    no_auth: options.NoAuth = False,
    open_paths: options.OpenPaths = False,
    engine_key: options.EngineKey = "",
    matching: options.Matchings = None,
    limit: options.RequestLimits = None,
    idle_hours: options.IdleHours = 24.0,
    keep_days: options.KeepDays = 30.0,
    as_json: options.Json = False,
) -> None:
    """Route to SGLang and vLLM workers and serve sessions from them, at one URL, until Ctrl+C.

    Example: `harness router --worker-urls http://127.0.0.1:30000,http://127.0.0.1:30001 --tokenizer MODEL_DIR`
    """
    import uvloop

    from harness.router.routed import RouterSettings, route_forever
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
    routing = RouterSettings(
        worker_urls=tuple(url.strip() for url in worker_urls.split(",") if url.strip()),
        router_url=router_url,
        engine_key=engine_key,
        gateway_arguments=tuple(shlex.split(gateway_args)),
        gateway_log=gateway_log,
        worker_limit=worker_limit,
        queue_timeout_s=queue_timeout,
        start_timeout_s=start_timeout,
    )
    routing.check()
    chat_tokenizer = open_chat_tokenizer(tokenizer_directory(tokenizer, model_directory(model)), renderer=renderer)
    program = _program(gateway) if router_url is None else None

    def announce(running: "RunningServer", front: "Gateway") -> None:
        if as_json:
            _print(running, front, options.made_token(settings, access))
        else:
            _say_url(running, front)
            options.say_who_may_ask(settings, access)

    uvloop.run(route_forever(routing, program, chat_tokenizer, open_store(store), settings, started=announce))


def _program(name: str) -> "GatewayProgram":
    from harness.router.gateway_program import gateway_program

    return gateway_program(name, output.say)


def _print(running: "RunningServer", gateway: "Gateway", admin_token: str | None) -> None:
    output.print_json(
        {
            "url": running.url,
            "sessions_restored": running.restored,
            "admin_token": admin_token,
            "gateway": {"url": gateway.url, "kind": str(gateway.kind), "restrictions": list(gateway.restrictions)},
        }
    )
    sys.stdout.flush()


def _say_url(running: "RunningServer", gateway: "Gateway") -> None:
    for restriction in gateway.restrictions:
        output.say(f"the gateway is restricted: {gateway.kind} {restriction}")
    output.say(
        f"routing and serving sessions at {running.url} in front of {gateway.kind} at {gateway.url}; Ctrl+C stops"
    )
