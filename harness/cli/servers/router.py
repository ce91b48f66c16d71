"""`harness router`: an SGLang router that also serves sessions."""

import asyncio
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from harness.cli import options, output
from harness.machine.extras import require_package

if TYPE_CHECKING:
    from harness.server.serving import RunningServer
    from server_patch.router.gateway import Gateway

_WorkerUrls = Annotated[
    str,
    options.option("HARNESS_WORKER_URLS", "Workers of a gateway to start; more can come later.", metavar="URL[,URL]"),
]
_RouterUrl = Annotated[str | None, options.option("HARNESS_ROUTER_URL", "A running gateway.")]
_Gateway = Annotated[
    str, options.option("HARNESS_GATEWAY", "The gateway to start: `smg`, or the restricted `sglang-router`.")
]
_GatewayArguments = Annotated[str, options.option("HARNESS_GATEWAY_ARGS", "More arguments for the gateway.")]
_GatewayLog = Annotated[Path | None, options.option("HARNESS_GATEWAY_LOG", "Log file for the gateway's output.")]
_Model = Annotated[
    str | None, options.option("HARNESS_MODEL", "The model that the workers serve: catalogue name, folder or hub id.")
]
_Limit = Annotated[
    int, options.option("HARNESS_WORKER_LIMIT", "Maximum concurrent session requests per worker.", min=1)
]
_QueueTimeout = Annotated[
    float, options.option("HARNESS_QUEUE_TIMEOUT", "Seconds a session request waits for a worker.", min=0)
]
_StartTimeout = Annotated[float, options.option("HARNESS_START_TIMEOUT", "Seconds to wait for a first worker.", min=0)]


@options.takes_server_options
def router(
    *,
    worker_urls: _WorkerUrls = "",
    router_url: _RouterUrl = None,
    gateway: _Gateway = "smg",
    gateway_args: _GatewayArguments = "",
    gateway_log: _GatewayLog = None,
    model: _Model = None,
    worker_limit: _Limit = 256,
    queue_timeout: _QueueTimeout = 600.0,
    start_timeout: _StartTimeout = 600.0,
    server: options.ServerOptions,
    as_json: options.Json = False,
) -> None:
    """Route to SGLang and vLLM workers and serve sessions from them, at one URL, until Ctrl+C.

    Example: `harness router --worker-urls http://127.0.0.1:30000,http://127.0.0.1:30001 --tokenizer MODEL_DIR`
    """
    import uvloop

    require_package("aiohttp", "run", "harness router")
    from harness.cli.download import fetch
    from harness.engines.teachers import check_teachers
    from harness.gateway.router.gateway_program import gateway_program
    from harness.gateway.router.routed import RouterSettings, route_forever
    from harness.machine.this_process import raise_descriptor_limit, settle
    from harness.server.store.sqlite import open_store

    raise_descriptor_limit()
    settings = server.settings()
    routing = RouterSettings(
        worker_urls=tuple(url.strip() for url in worker_urls.split(",") if url.strip()),
        router_url=router_url,
        engine_key=server.engine_key,
        gateway_arguments=tuple(shlex.split(gateway_args)),
        gateway_log=gateway_log,
        worker_limit=worker_limit,
        queue_timeout_s=queue_timeout,
        start_timeout_s=start_timeout,
    )
    routing.check()
    check_teachers(settings.teachers, *(f"sglang={url}" for url in (*routing.worker_urls, router_url or "") if url))
    chat_tokenizer = server.open_tokenizer(None if model is None else fetch(model))
    program = asyncio.run(gateway_program(gateway, output.say)) if router_url is None else None

    def announce(running: "RunningServer", front: "Gateway") -> None:
        settle()  # the sessions that were restored stay, too
        for restriction in () if as_json else front.restrictions:
            output.say(f"the gateway is restricted: {front.kind} {restriction}")
        said = f"routing and serving sessions at {running.url} in front of {front.kind} at {front.url}; Ctrl+C stops"
        facts = {"url": front.url, "kind": str(front.kind), "restrictions": list(front.restrictions)}
        restored = running.restored
        server.announce(running.url, settings, said, as_json=as_json, sessions_restored=restored, gateway=facts)

    uvloop.run(route_forever(routing, program, chat_tokenizer, open_store(server.store), settings, started=announce))
