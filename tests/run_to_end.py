"""Programs that are run to their end, of which nothing is left however that ends."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any


async def run_to_end(*command: str | Path, within_s: float, **how: Any) -> tuple[int | None, str, str]:
    """Exit code, output and errors; whatever is left of its process group is killed, also after `TimeoutError`."""
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, **pipes, start_new_session=True, **how)
    try:
        output, errors = await asyncio.wait_for(process.communicate(), within_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return process.returncode, output.decode(), errors.decode()
