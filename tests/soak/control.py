"""A controller as a process of its own: `control.py KIND SERVER ENGINE VERSION TTL`; fails when its gate is open."""

import asyncio
import sys
from pathlib import Path

from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.abort_report import AbortBudget, AgentHooks
from harness.rollouts.control.pause import paused_rollout
from harness.rollouts.control.weights import WeightUpdater
from harness.rollouts.control.weights_report import UpdateBudget


async def stay(server: str) -> None:
    """Be at work for a while, under a gate that must be shut."""
    async with SessionServerClient(server) as client:
        for _ in range(3):
            report = await client.gate().report(deadline_s=20)
            assert report.state != "open", report
            await asyncio.sleep(0.02)


async def control(kind: str, server: str, engine: str, version: int, ttl_s: float) -> None:
    """Do the work of `kind` once."""
    if kind == "update":
        budget = UpdateBudget(sweep_s=0, hold_ttl_s=ttl_s, turn_s=60)
        async with WeightUpdater([engine], [server], budget=budget).update(version) as update:
            await stay(server)
            await update.apply(Path("/weights/b"))
            await stay(server)
    elif kind == "pause":
        async with paused_rollout([server], [engine], AbortBudget(hold_ttl_s=ttl_s)):
            await stay(server)
    else:
        hooks = AgentHooks("at work", abort=lambda: stay(server))
        report = await abort_rollout(
            [],
            session_servers=[server],
            engine_workers=[engine],
            agent_hooks=[hooks],
            budget=AbortBudget(hold_ttl_s=ttl_s),
        )
        assert report.problems == (), report.problems


if __name__ == "__main__":
    what, at, of, number, seconds = sys.argv[1:]
    asyncio.run(control(what, at, of, int(number), float(seconds)))
