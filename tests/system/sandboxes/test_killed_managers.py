"""`kill -9` of a manager: its boxes end or are found, and `harness sandboxes prune` leaves nothing of them."""

import asyncio
import json
import os
import random
import subprocess
import sys

from harness.rollouts.sandboxes.boxed import remove_left
from tests.system.sandboxes.conftest import KINDS
from tests.system.sandboxes.test_ends import MARK, NOTHING, STUBBORN, boxes_of, left_of_boxes

KILLS = int(os.environ.get("HARNESS_SOAK_KILLS", "3"))
START_S = GONE_S = 90.0


async def prune() -> None:
    """Run the command; it says so of what its processes still hold."""
    command = (sys.executable, "-m", "harness", "sandboxes", "prune")
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False, timeout=200)
    assert done.returncode in (0, 6), done.stderr


async def test_killed_managers_leave_nothing_behind_a_prune(spec_of, run_boxed, server, tmp_path):
    """They die while both agents work, or at any moment of the start; the next box or a prune finds what is left."""
    specs = {kind: spec_of(kind, memory_mb=256) for kind in KINDS}
    told = json.dumps([spec.model_dump(exclude_defaults=True) for spec in specs.values()])
    chance = random.Random(19)
    for kill in range(KILLS):
        folder = tmp_path / str(kill)
        command = (sys.executable, "-m", "tests.system.sandboxes.manager_program", server.url, str(folder))
        script = f"{STUBBORN}\n# {MARK}"
        manager = await asyncio.create_subprocess_exec(*command, script, told, stdout=asyncio.subprocess.PIPE)
        try:
            async with asyncio.timeout(START_S):
                assert await manager.stdout.readline() == b"ready\n"
                if kill % 2:
                    await asyncio.sleep(chance.uniform(0, 1.5))
                while not kill % 2 and not all((folder / kind / "started").exists() for kind in KINDS):
                    assert manager.returncode is None
                    await asyncio.sleep(0.02)
            if kill == 0:
                await prune()
                boxes = boxes_of(manager.pid)  # a manager that lives keeps them
                assert [len(boxes[each]) for each in ("containers", "cgroups", "folders")] == [1, 1, 2]
        finally:
            manager.kill()
            await manager.wait()
        if kill == 2:
            await run_boxed(specs["podman"], "")
            assert boxes_of(manager.pid)["containers"] == []
        # What the manager's own programs were about to do, they finish within the watchdog's grace. The boxes of other
        # tests may remove these meanwhile.
        async with asyncio.timeout(GONE_S):
            while any(boxes_of(manager.pid).values()) or left_of_boxes(manager.pid) != NOTHING:
                await (prune() if kill == 0 else remove_left())
                await asyncio.sleep(0.1)
