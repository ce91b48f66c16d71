"""A manager that is killed: one stubborn agent in a box of each kind. Run with URL, FOLDER and specs as JSON."""

import asyncio
import json
import sys
from pathlib import Path

from harness.rollouts.manager import SessionManager
from harness.rollouts.sandboxes.spec import SandboxSpec
from tests.system.sandboxes.conftest import boxed_task


async def main(url: str, folder: Path, script: str, specs: str) -> None:
    """Run until killed."""
    async with SessionManager(url) as manager:
        tasks = [
            boxed_task(spec, script, folder / spec.kind, deadline_s=120)
            for spec in (SandboxSpec(**each) for each in json.loads(specs))
        ]
        print("ready", flush=True)
        await asyncio.gather(*map(manager.run, tasks))


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
