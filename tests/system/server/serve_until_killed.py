"""A session server as a process of its own, with a scripted engine: `serve_until_killed.py STORE`.

Prints its URL on one line once it answers; then serves until it is killed.
"""

import asyncio
import sys
from pathlib import Path

from harness.engines.scripted import ScriptStep
from harness.telemetry.logging import configure_logging
from tests.session_servers.served import serving


async def main() -> None:
    configure_logging("error")
    steps = [ScriptStep(text=f"answer {number} " + "x" * (number % 7), token_delay_s=0.001) for number in range(50)]
    async with serving(*steps, store=Path(sys.argv[1])) as client:
        print(client.url, flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
