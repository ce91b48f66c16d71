"""A rollout that stands still and goes on later, its agents alive all the time.

    async with manager.paused() as report:  # a `SessionManager` that knows its engines
        ...  # train on what is there; the engines are idle, the agents wait at the gate

`paused_rollout` is the full form, for several session servers.

Pending tasks stay pending. Turns in flight end inside the engines and are continued from their partial output when
the gate opens, as the same turns; the agents notice nothing but time. The hold of this pause leaves the gate at the end
of the block, whatever happens in it (I8); a weight update inside the block has a hold of its own and does not open it.
The block must let the loop run: a hold that is not renewed runs out, so train in a thread.

Bounded by others: a server holds a request for its `pause_timeout_s`, a client waits as long as it is built to, an
agent has its deadline. A rollout that has to wait longer is aborted, and resumed from its session (`Keep.SESSIONS`).
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from harness.client.connections import SessionServerAddress
from harness.client.gate import GateClient, new_holder, renew_holds
from harness.client.session_server import SessionServerClient
from harness.control.abort_report import AbortBudget, CallReport, ServerAnswer
from harness.control.engines import EngineWorker, as_workers
from harness.control.quiesce import at_every_gate, quieten, resume_every_gate
from harness.control.routed_engines import learn_workers
from harness.engines.base import TokenProvider
from harness.machine.deadlines import to_the_end
from harness.machine.log import get_logger

ROLLOUT_PAUSED = "rollout_paused"

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PauseReport:
    """How far the rollout came to a stand."""

    paused: tuple[ServerAnswer, ...]
    engines: tuple[CallReport, ...]
    turns_left: int | None
    """Turns that were still being generated when the block began; None when no session server could say."""

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for everything that did not go as it should."""
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
    """For the time of the block no agent gets an answer and no engine is busy with them.

    Engines are named as for `abort_rollout`, which also says what is raised before anything has changed. Of `budget`
    the seconds of draining, engines and resuming count. Never raises for what goes wrong on the way.
    """
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
