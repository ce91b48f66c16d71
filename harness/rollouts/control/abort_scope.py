"""Scope of an abort: `WholeServers` shuts gates and ends every request, `NamedSessions` disturbs no other.

`WholeServers` also looks for engines that were left paused under no hold. A controller holds every gate before it
pauses an engine, so only all gates together know whose pause it is. While one is silent, the engine stays paused and is
reported. Without session servers the caller is believed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

from harness.errors import ScenarioError
from harness.machine.deadlines import attempt, to_the_end
from harness.rollouts.client.gate import GateClient, new_holder, renew_holds
from harness.rollouts.client.session_server import SessionFacts, SessionServerClient
from harness.rollouts.control.abort_report import CallReport, ServerAnswer
from harness.rollouts.control.engines import EngineWorker, Pausable
from harness.rollouts.control.pause import Quiet, at_every_gate, claim_engines, quieten, resume_every_gate

_LOOK_S = 3.0  # at engines that have just answered, and at the gates
_LOOK_SHARE = 0.3  # of the time to quieten, at most: one that ends nothing must leave it, because a pause may be why
_PARTS = 2  # look at workers, ask gates
_PARTS_OF_CONTINUING = 4  # look, claim, continue, release
_CLAIM_TTL_S = 10.0  # frees the claim if this process dies; longer than all four parts take
_ANSWER_S = 0.5  # of the time to quieten: kept for the answer that says what is left


class WholeServers:
    """Everything behind `gates` and on `workers`."""

    def __init__(self, gates: Sequence[GateClient], workers: Sequence[EngineWorker], *, continues: bool) -> None:
        self._gates = gates
        self._workers = workers
        self._continues = continues

    def hold(self) -> AbstractAsyncContextManager[object]:
        """Keep gates shut during the block, and until `release`."""
        return renew_holds(self._gates)

    async def drain(self, seconds: float) -> list[ServerAnswer]:
        """Drain the sessions for good, and shut the gates."""
        return await at_every_gate(self._gates, GateClient.drain, seconds)

    async def quieten(self, drained: Sequence[ServerAnswer], seconds: float) -> Quiet:
        """End requests in the engines of the servers that `drained` them, and look for paused workers."""
        reached = [gate for gate, answer in zip(self._gates, drained, strict=True) if answer.error is None]
        look_s = min(_LOOK_S, _LOOK_SHARE * seconds)
        quiet = await quieten(self._workers, reached, seconds - look_s)
        answers = zip(self._workers, quiet.engines, strict=True)
        answered = [worker for worker, answer in answers if answer.error is None]
        quiet.left_paused = await look_for_paused(answered, self._gates, look_s, continues=self._continues)
        return quiet

    async def release(self, seconds: float) -> list[ServerAnswer]:
        """Open what `hold` shut; other holders' holds stay."""
        return await resume_every_gate(self._gates, seconds)


class NamedSessions:
    """The sessions `ids`, on any server."""

    def __init__(self, servers: Sequence[SessionServerClient], ids: Collection[str]) -> None:
        if isinstance(ids, str):  # a collection of strings too: one per character
            raise ScenarioError(f"sessions: expected a list of session ids, got the text {ids!r}")
        self._servers = servers
        self._ids = tuple(dict.fromkeys(ids))

    def hold(self) -> AbstractAsyncContextManager[object]:
        return nullcontext()  # gates stay open

    async def drain(self, seconds: float) -> list[ServerAnswer]:
        answers = await asyncio.gather(*(self._ask(server, server.drain, seconds) for server in self._servers))
        return [answer for answer, _ in answers]

    async def quieten(self, drained: Sequence[ServerAnswer], seconds: float) -> Quiet:
        """End their requests where they were `drained`. Reports no engine."""
        reached = [server for server, answer in zip(self._servers, drained, strict=True) if answer.error is None]
        within_s = max(0.0, seconds - _ANSWER_S)
        ends = [self._ask(server, partial(server.end, within_s=within_s), seconds) for server in reached]
        known = [sum(each.turns_in_flight for each in facts) for answer, facts in await asyncio.gather(*ends) if facts]
        return Quiet(turns_left=sum(known) if known else None)

    async def release(self, seconds: float) -> list[ServerAnswer]:
        return []

    async def _ask(
        self, server: SessionServerClient, verb: Callable[[str], Awaitable[SessionFacts]], seconds: float
    ) -> tuple[ServerAnswer, list[SessionFacts]]:
        facts: list[SessionFacts] = []

        async def ask(session_id: str) -> None:
            facts.append(await verb(session_id))

        attempts = (attempt(partial(ask, each), seconds, name=f"session {each}") for each in self._ids)
        errors = [error for error in await asyncio.gather(*attempts) if error is not None]
        summary = f"{len(errors)} of {len(self._ids)} sessions: {errors[0]}" if errors else None
        return ServerAnswer(server.address.url, summary), facts


AbortScope = WholeServers | NamedSessions


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
