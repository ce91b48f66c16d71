"""Engines that are paused although nobody who is known works on them: said, and continued when that is asked for.

An engine whose pause is covered by a hold on a session server's gate is somebody's, and is left alone. A worker
that does not say counts as running.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from harness.client.gate import GateClient
from harness.control.abort_report import CallReport
from harness.control.engines import EngineWorker, Pausable
from harness.machine.deadlines import attempt

_PARTS = 3  # looked at, asked about, continued


async def look_for_paused(
    workers: Sequence[EngineWorker], gates: Sequence[GateClient], seconds: float, *, continues: bool
) -> list[CallReport]:
    """The workers that were left paused: with an error, unless they were continued. All of it takes `seconds`."""
    seconds /= _PARTS
    found: list[EngineWorker] = []
    covered: list[bool] = []

    async def look_at(worker: EngineWorker) -> None:
        if isinstance(worker, Pausable) and await worker.is_paused(deadline_s=seconds):
            found.append(worker)

    async def ask(gate: GateClient) -> None:
        report = await gate.report(deadline_s=seconds)
        covered.append(any(hold.engines for hold in report.holds))

    await asyncio.gather(*(attempt(partial(look_at, each), seconds, name=f"look at {each.name}") for each in workers))
    if found:
        await asyncio.gather(*(attempt(partial(ask, gate), seconds, name=f"look at {gate.url}") for gate in gates))
    if not found or any(covered):
        return []
    paused = [worker for worker in found if isinstance(worker, Pausable)]
    if not continues:
        said = "is paused, and no hold on a gate covers it: continue it, or pass continue_engines=True"
        return [CallReport(worker.name, said) for worker in paused]
    calls = (
        attempt(partial(worker.resume, deadline_s=seconds), seconds, name=f"continue {worker.name}")
        for worker in paused
    )
    return [CallReport(worker.name, error) for worker, error in zip(paused, await asyncio.gather(*calls), strict=True)]
