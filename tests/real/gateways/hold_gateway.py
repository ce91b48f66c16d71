"""Starts a gateway and holds it: `hold_gateway.py KIND EXECUTABLE LOG` prints its URL, then waits to be killed."""

import asyncio
import sys
from pathlib import Path

from harness.server.telemetry.logging import configure_logging
from server_patch.router.app import open_http
from server_patch.router.gateway import GatewayKind, launch


async def main(kind: str, executable: str, log_file: str) -> None:
    async with (
        open_http() as http,
        launch(http, Path(executable), GatewayKind(kind), [], log_file=Path(log_file)) as gateway,
    ):
        print(gateway.url, flush=True)
        await asyncio.Event().wait()


configure_logging("error")
asyncio.run(main(*sys.argv[1:]))
