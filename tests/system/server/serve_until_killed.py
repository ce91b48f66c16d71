"""A session server as a process of its own, with a scripted engine: `serve_until_killed.py STORE [LENGTH]`.

Prints its URL on one line once it answers; then serves until it is killed. Answers are `LENGTH` characters longer than
they would be.
"""

import asyncio
import sys
from pathlib import Path

from harness.engines.scripted import ScriptStep
from harness.server.telemetry.logging import configure_logging
from tests.session_servers.served import serving


async def main() -> None:
    configure_logging("error")
    more = "".join(f"and {number}, " for number in range(int((sys.argv[2:] or ["0"])[0]) // 8))
    texts = [f"answer {number} " + "x" * (number % 7) + more for number in range(50)]
    steps = [ScriptStep(text=text, token_delay_s=0.001) for text in texts]
    async with serving(*steps, store=Path(sys.argv[1])) as client:
        print(client.url, flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
