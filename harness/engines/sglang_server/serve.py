"""Serves an engine's application in the running loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from harness.machine.asgi import EmbeddedServer, answering, listening

LOOPBACK = "127.0.0.1"

_SHUTDOWN_S = 2


@asynccontextmanager
async def serve_in_process(app: ASGIApp, *, host: str = LOOPBACK, port: int = 0) -> AsyncIterator[str]:
    """Serve `app` in the block and yield its base address; port 0 picks a free one. Raises `HarnessError` if taken."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=_SHUTDOWN_S
    )
    with listening(host, port) as listener:
        async with answering(EmbeddedServer(config), listener):
            yield f"http://{host}:{listener.getsockname()[1]}"
