"""A session server as a process of its own, with a scripted engine: `serve_until_killed.py STORE [LENGTH [PORT]]`.

Prints its URL on one line once it answers; then serves until it is killed. Answers are `LENGTH` characters longer than
they would be, and come slowly; the engine drops a request now and then.
"""

import asyncio
import sys
from pathlib import Path

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.server.settings import ServerSettings
from harness.server.telemetry.logging import configure_logging
from tests.session_servers.served import serving

DROPPED = ScriptStep(text="in two parts", token_delay_s=0.001, fault=ScriptedFault.ABORT, fault_after=4)


async def main(store: str, length: str = "0", port: str = "0") -> None:
    configure_logging("critical")
    more = "".join(f"and {number}, " for number in range(int(length) // 8))
    texts = [f"answer {number} " + "x" * (number % 7) + more for number in range(50)]
    steps = [ScriptStep(text=text, token_delay_s=0.001) for text in texts]
    settings = ServerSettings(port=int(port), engine_retry_s=0.01)
    async with serving(*steps, DROPPED, store=Path(store), settings=settings) as client:
        print(client.url, flush=True)
        await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
