"""Engines that were left paused under no hold.

A controller holds every gate before it pauses an engine, so only all gates together know whose pause it is. While one
is silent, the engine stays paused and is reported. Without session servers the caller is believed.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from harness.machine.deadlines import attempt, to_the_end
from harness.rollouts.client.gate import GateClient, new_holder
from harness.rollouts.control.abort_report import CallReport, ServerAnswer
from harness.rollouts.control.engines import EngineWorker, Pausable
from harness.rollouts.control.quiesce import at_every_gate, claim_engines, resume_every_gate

_PARTS = 2  # look at workers, ask gates
_PARTS_OF_CONTINUING = 4  # look, claim, continue, release
_CLAIM_TTL_S = 10.0  # frees the claim if this process dies; longer than all four parts take


async def look_for_paused(
    workers: Sequence[EngineWorker], gates: Sequence[GateClient], seconds: float, *, continues: bool
) -> list[CallReport]:
    """Return the workers left paused, with an error unless continued."""
    seconds /= _PARTS_OF_CONTINUING if continues else _PARTS
    found: list[EngineWorker] = []

    async def look_at(worker: EngineWorker) -> None:
        if isinstance(worker, Pausable) and await worker.is_paused(deadline_s=seconds):
            found.append(worker)

    await asyncio.gather(*(attempt(partial(look_at, each), seconds, name=f"look at {each.name}") for each in workers))
    if not found:
        return []
    if continues:
        return await _continue(found, gates, seconds)
    answers = await at_every_gate(gates, GateClient.report, seconds)
    if any(hold.engines for answer in answers if answer.gate for hold in answer.gate.holds):
        return []
    return _say(found, _unknown(answers) or "no hold on a gate covers it: continue it, or pass continue_engines=True")


async def _continue(found: Sequence[EngineWorker], gates: Sequence[GateClient], seconds: float) -> list[CallReport]:
    holder = new_holder("continue")
    claims = [gate.under(holder, _CLAIM_TTL_S) for gate in gates]

    async def go_on(worker: EngineWorker) -> CallReport:
        assert isinstance(worker, Pausable)
        call = partial(worker.resume, deadline_s=seconds)
        return CallReport(worker.name, await attempt(call, seconds, name=f"continue {worker.name}"))

    # Only one holder can claim the engines at every gate, so no other controller pauses them in between.
    try:
        answers, taken = await claim_engines(claims, seconds)
        if taken:
            return []
        if why := _unknown(answers):
            return _say(found, why)
        return await asyncio.gather(*map(go_on, found))
    finally:
        # Nothing was paused under the claim, so no server has to continue what another controller may have paused.
        await to_the_end(resume_every_gate(claims, seconds, engines_continued=True))


def _unknown(answers: Sequence[ServerAnswer]) -> str:
    silent = [f"{each.url} cannot say whose pause it is ({each.error})" for each in answers if each.error]
    if not silent:
        return ""
    return (
        f"{'; '.join(silent)}, so it stays paused: abort again with continue_engines=True when the server answers, or"
        " continue it yourself when no other controller works on it"
    )


def _say(found: Sequence[EngineWorker], why: str) -> list[CallReport]:
    return [CallReport(worker.name, f"is paused, and {why}") for worker in found]
