"""Pause of a rollout, with its agents alive; engines stopped, and verified to have stopped.

    async with manager.paused() as report:  # a `SessionManager` that knows its engines
        ...  # train; the engines are idle, the agents wait at the gate

Turns in flight continue from their partial output afterwards. The hold is released in any case (I8). The block must let
the event loop run, or the hold expires: train in a thread. Timeouts of server (`pause_timeout_s`), clients and agents
still apply; for longer, abort with `Keep.SESSIONS`.

An abort misses a request still on its way, so it is repeated until no turn generates. Session servers know that;
engines' counters lag and include other clients. The gates must be shut.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from harness.engines.base import TokenProvider
from harness.errors import EnginesHeld, SessionServerError
from harness.machine.deadlines import attempt, not_in_time, to_the_end, within
from harness.machine.log import get_logger
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.gate import GateClient, new_holder, renew_holds
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort_report import AbortBudget, CallReport, ServerAnswer
from harness.rollouts.control.engines import EngineWorker, as_workers, learn_workers
from harness.sessions.gate import GateReport

ROLLOUT_PAUSED = "rollout_paused"
GATE_NOT_RESUMED = "gate_not_resumed"

_FIRST_LOOK_S = 0.02
_LONGEST_LOOK_S = 0.5

_log = get_logger(__name__)


@dataclass(slots=True)
class Quiet:
    engines: list[CallReport] = field(default_factory=list)
    """Last answer of each worker."""
    turns_left: int | None = None
    """Turns still generating; None if unknown."""
    left_paused: list[CallReport] = field(default_factory=list)
    """Workers paused under no hold; without an error they were continued."""


async def quieten(workers: Sequence[EngineWorker], gates: Sequence[GateClient], seconds: float) -> Quiet:
    """End the requests of `workers` until no turn generates."""
    quiet = Quiet([CallReport(worker.name, not_in_time(seconds)) for worker in workers])
    is_quiet = asyncio.Event()
    telling = (_tell(worker, index, quiet, is_quiet, seconds) for index, worker in enumerate(workers))
    await within(seconds, asyncio.gather(_watch(gates, quiet, is_quiet, seconds), *telling))
    return quiet


async def at_every_gate(
    gates: Sequence[GateClient], verb: Callable[..., Awaitable[GateReport | None]], seconds: float
) -> list[ServerAnswer]:
    """Call a method of `GateClient` everywhere. Return each answer or error."""

    async def ask(gate: GateClient) -> ServerAnswer:
        reports: list[GateReport | None] = []

        async def turn() -> None:
            reports.append(await verb(gate, deadline_s=seconds))

        error = await attempt(turn, seconds, name=f"gate of {gate.url}")
        return ServerAnswer(gate.url, error, reports[0] if error is None else None)

    return await asyncio.gather(*(ask(gate) for gate in gates))


async def claim_engines(gates: Sequence[GateClient], seconds: float) -> tuple[list[ServerAnswer], list[str]]:
    """Close every gate and claim the engines. Return the answers, and where another controller holds them."""
    taken: list[str] = []

    async def claim(gate: GateClient, *, deadline_s: float) -> GateReport | None:
        try:
            return await gate.pause(deadline_s=deadline_s, engines=True)
        except SessionServerError as error:
            if error.code != EnginesHeld.code:
                raise
            taken.append(f"{gate.url}: {error.message}")
            return None

    return await at_every_gate(gates, claim, seconds), taken


async def resume_every_gate(
    gates: Sequence[GateClient], seconds: float, *, engines_continued: bool = False
) -> list[ServerAnswer]:
    """Release every hold; log failures."""
    answers = await at_every_gate(gates, partial(GateClient.resume, engines_continued=engines_continued), seconds)
    for answer in answers:
        if answer.error:
            _log.warning(GATE_NOT_RESUMED, url=answer.url, error=answer.error)
    return answers


async def _tell(worker: EngineWorker, index: int, quiet: Quiet, is_quiet: asyncio.Event, seconds: float) -> None:
    pause_s = _FIRST_LOOK_S
    while True:
        error = await attempt(partial(worker.abort_all, deadline_s=seconds), seconds, name=f"abort: {worker.name}")
        quiet.engines[index] = CallReport(worker.name, error)
        if await within(pause_s, is_quiet.wait()):
            return
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)


async def _watch(gates: Sequence[GateClient], quiet: Quiet, is_quiet: asyncio.Event, seconds: float) -> None:
    pause_s = _FIRST_LOOK_S
    while True:
        answers = await at_every_gate(gates, GateClient.report, seconds)
        known = [answer.gate.turns_generating for answer in answers if answer.gate is not None]
        quiet.turns_left = sum(known) if known else None
        if not quiet.turns_left:
            is_quiet.set()
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)


@dataclass(frozen=True, slots=True)
class PauseReport:
    paused: tuple[ServerAnswer, ...]
    engines: tuple[CallReport, ...]
    turns_left: int | None
    """Turns still generating; None if unknown."""

    @property
    def problems(self) -> tuple[str, ...]:
        """One line per problem."""
        return (
            *(f"pause {answer.url}: {problem}" for answer in self.paused for problem in answer.problems),
            *(f"engine {answer.name}: {answer.error}" for answer in self.engines if answer.error),
            *((f"engines: {self.turns_left} turns still in flight",) if self.turns_left else ()),
        )


@asynccontextmanager
async def paused_rollout(
    session_servers: Sequence[SessionServerAddress | str],
    engine_workers: Sequence[TokenProvider | EngineWorker | str] = (),
    budget: AbortBudget | None = None,
) -> AsyncIterator[PauseReport]:
    """Keep agents waiting and engines idle while the block runs. Takes engines and raises as `abort_rollout`."""
    budget, holder = budget or AbortBudget(), new_holder("pause")
    workers = as_workers(await learn_workers(engine_workers, session_servers, budget.engines_s))
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(SessionServerClient(each)) for each in session_servers]
        gates = [server.gate(holder, budget.hold_ttl_s) for server in servers]
        try:
            async with renew_holds(gates):
                paused = await at_every_gate(gates, GateClient.pause, budget.drain_s)
                reached = [gate for gate, answer in zip(gates, paused, strict=True) if answer.error is None]
                quiet = await quieten(workers, reached, budget.engines_s)
                report = PauseReport(tuple(paused), tuple(quiet.engines), quiet.turns_left)
                held = sum(answer.gate.held for answer in paused if answer.gate)
                _log.info(ROLLOUT_PAUSED, held=held, problems=report.problems)
                yield report
        finally:
            await to_the_end(resume_every_gate(gates, budget.resume_s))
