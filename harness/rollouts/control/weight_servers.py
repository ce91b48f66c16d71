"""Session servers of a weight update, held under one name. A failure goes into the report, and delays no other."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from harness.machine.deadlines import attempt
from harness.rollouts.client.gate import GateClient, new_holder, renew_holds
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort_report import ServerAnswer
from harness.rollouts.control.quiesce import at_every_gate, claim_engines
from harness.rollouts.control.weights_report import ServerUpdate, UpdateBudget, UpdateReport, UpdateStep
from harness.sessions.weights.weight_update import SweepRequest


class ServersInUpdate:
    def __init__(self, clients: Sequence[SessionServerClient], report: UpdateReport, budget: UpdateBudget) -> None:
        report.servers = tuple(ServerUpdate(client.address.url) for client in clients)
        holder = new_holder("update")
        self._gates = tuple(client.gate(holder, budget.hold_ttl_s) for client in clients)
        self._servers = tuple(zip(report.servers, clients, strict=True))
        self._report = report
        self._budget = budget

    def renew_holds(self) -> AbstractAsyncContextManager[None]:
        return renew_holds(self._gates)

    async def sweep(self, request: SweepRequest) -> None:
        async def ask(server: ServerUpdate, client: SessionServerClient) -> None:
            server.sweep = await client.sweep(request)

        longest_s = self._budget.sweep_s + self._budget.gate_s
        await self._at_every_server(UpdateStep.SWEEP, [partial(ask, *each) for each in self._servers], longest_s)

    async def pause(self) -> str | None:
        """Close every gate and claim the engines. Return the reason if another controller holds them, else None."""
        answers, taken = await claim_engines(self._gates, self._budget.gate_s)
        self._note(UpdateStep.PAUSE_GATES, answers)
        return taken[0] if taken else None

    async def resume(self, *, engines_continued: bool) -> None:
        """Release the holds. Servers continue the engines unless `engines_continued`."""
        release = partial(GateClient.resume, engines_continued=engines_continued)
        self._note(UpdateStep.RESUME_GATES, await at_every_gate(self._gates, release, self._budget.gate_s))

    async def find_lost(self) -> list[str]:
        """Renew the holds. Return where one has expired."""
        seconds = self._budget.gate_s
        held = (gate for gate in self._gates if gate.is_held)
        await asyncio.gather(
            *(attempt(partial(gate.renew, deadline_s=seconds), seconds, name="renew a hold") for gate in held)
        )
        return [gate.url for gate in self._gates if gate.has_run_out]

    async def take_back(self) -> bool:
        """Claim the engines again where a hold expired."""
        # A server continues the engines when a hold expires, or leaves them to another update that has them. One
        # restarted without its store knows of neither and would leave them paused forever.
        seconds = self._budget.gate_s
        lost = (gate for gate in self._gates if gate.has_run_out)
        calls = (partial(gate.pause, deadline_s=seconds, engines=True) for gate in lost)
        errors = await asyncio.gather(*(attempt(call, seconds, name="take a hold back") for call in calls))
        return not any(errors)

    async def expect(self) -> None:
        """Have servers fence workers left behind."""

        async def ask(server: ServerUpdate, client: SessionServerClient) -> None:
            server.weights = await client.expect(self._report.version)

        calls = [partial(ask, *each) for each in self._servers]
        await self._at_every_server(UpdateStep.VERIFY, calls, self._budget.verify_s)

    def _note(self, step: UpdateStep, answers: Sequence[ServerAnswer]) -> None:
        for (server, _), answer in zip(self._servers, answers, strict=True):
            if answer.problems:
                server.errors[step] = "; ".join(answer.problems)

    async def _at_every_server(
        self, step: UpdateStep, calls: Sequence[Callable[[], Awaitable[object]]], seconds: float
    ) -> None:
        attempts = (
            attempt(call, seconds, name=f"{step} {server.url}")
            for (server, _), call in zip(self._servers, calls, strict=True)
        )
        for (server, _), error in zip(self._servers, await asyncio.gather(*attempts), strict=True):
            if error is not None:
                server.errors[step] = error
