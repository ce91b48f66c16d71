"""A session server as a process of its own, on a port that its clients keep: `serve_port.py STORE PORT`.

Prints a line once it answers; then serves until it is killed. Its engine says the same to everybody, slowly, and drops
a request now and then.
"""

import asyncio
import sys
from pathlib import Path

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.server.settings import ServerSettings
from harness.server.telemetry.logging import configure_logging
from tests.session_servers.served import serving

SLOW = [ScriptStep(text=f"answer {number} " + "x" * (number % 7), token_delay_s=0.001) for number in range(50)]
DROPPED = ScriptStep(text="in two parts", token_delay_s=0.001, fault=ScriptedFault.ABORT, fault_after=4)


async def main() -> None:
    configure_logging("critical")
    settings = ServerSettings(port=int(sys.argv[2]), engine_retry_s=0.01)
    async with serving(*SLOW, DROPPED, store=Path(sys.argv[1]), settings=settings) as client:
        print(client.url, flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
