"""Pause of a rollout, with its agents alive.

    async with manager.paused() as report:  # a `SessionManager` that knows its engines
        ...  # train; the engines are idle, the agents wait at the gate

Turns in flight continue from their partial output afterwards. The hold is released in any case (I8). The block must let
the event loop run, or the hold expires: train in a thread. Timeouts of server (`pause_timeout_s`), clients and agents
still apply; for longer, abort with `Keep.SESSIONS`.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from harness.engines.base import TokenProvider
from harness.machine.deadlines import to_the_end
from harness.machine.log import get_logger
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.gate import GateClient, new_holder, renew_holds
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort_report import AbortBudget, CallReport, ServerAnswer
from harness.rollouts.control.engines import EngineWorker, as_workers
from harness.rollouts.control.quiesce import at_every_gate, quieten, resume_every_gate
from harness.rollouts.control.routed_engines import learn_workers

ROLLOUT_PAUSED = "rollout_paused"

_log = get_logger(__name__)


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
