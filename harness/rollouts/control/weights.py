"""Weight changes under running sessions: sweep, pause, apply, verify, and always reopen (I8).

    async with manager.updating_weights(3) as update:  # a `SessionManager` that knows its engines
        await update.apply(checkpoint)

The sweep recomputes logprobs for the old version while turns continue. A worker that missed the update serves no
session until a later one. If no worker took it, the old weights are still served. Versions only go up.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableSequence, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_random

from harness.engines.base import PauseMode, TokenProvider
from harness.errors import EngineError, EngineUnavailable
from harness.machine.deadlines import attempt, last_result, to_the_end
from harness.machine.log import get_logger
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.gate import GateClient, new_holder, renew_holds
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort_report import ServerAnswer
from harness.rollouts.control.engines import EngineServer, learn_workers
from harness.rollouts.control.pause import at_every_gate, claim_engines
from harness.rollouts.control.weight_workers import Engines, EnginesInUpdate, Transfer, reach
from harness.rollouts.control.weights_report import ServerUpdate, UpdateBudget, UpdateReport, UpdateStep
from harness.sessions.weights.weight_update import SweepRequest
from harness.types import Sample

WEIGHT_UPDATE_ENDED = "weight_update_ended"

_ASK_AGAIN_S = (0.2, 1.0)  # random, so that two updates do not block each other in lockstep

log = get_logger(__name__)


class ServersInUpdate:
    """Session servers of an update, held under one name. A failure goes into the report, and delays no other."""

    def __init__(self, clients: Sequence[SessionServerClient], report: UpdateReport, budget: UpdateBudget) -> None:
        report.servers = tuple(ServerUpdate(client.address.url) for client in clients)
        holder = new_holder("update")
        self.gates = tuple(client.gate(holder, budget.hold_ttl_s) for client in clients)
        self._servers = tuple(zip(report.servers, clients, strict=True))
        self._report = report
        self._budget = budget

    async def sweep(self, request: SweepRequest) -> None:
        async def ask(server: ServerUpdate, client: SessionServerClient) -> None:
            server.sweep = await client.sweep(request)

        longest_s = self._budget.sweep_s + self._budget.gate_s
        await self._at_every_server(UpdateStep.SWEEP, ask, longest_s)

    async def pause(self) -> str | None:
        """Close every gate and claim the engines. Return the reason if another controller holds them, else None."""
        answers, taken = await claim_engines(self.gates, self._budget.gate_s)
        self._note(UpdateStep.PAUSE_GATES, answers)
        return taken[0] if taken else None

    async def resume(self, *, engines_continued: bool) -> None:
        """Release the holds. Servers continue the engines unless `engines_continued`."""
        release = partial(GateClient.resume, engines_continued=engines_continued)
        self._note(UpdateStep.RESUME_GATES, await at_every_gate(self.gates, release, self._budget.gate_s))

    async def find_lost(self) -> list[str]:
        """Renew the holds. Return where one has expired."""
        seconds = self._budget.gate_s
        held = (gate for gate in self.gates if gate.is_held)
        await asyncio.gather(
            *(attempt(partial(gate.renew, deadline_s=seconds), seconds, name="renew a hold") for gate in held)
        )
        return [gate.url for gate in self.gates if gate.has_run_out]

    async def take_back(self) -> bool:
        """Claim the engines again where a hold expired."""
        # A server continues the engines when a hold expires, or leaves them to another update that has them. One
        # restarted without its store knows of neither and would leave them paused forever.
        seconds = self._budget.gate_s
        lost = (gate for gate in self.gates if gate.has_run_out)
        calls = (partial(gate.pause, deadline_s=seconds, engines=True) for gate in lost)
        errors = await asyncio.gather(*(attempt(call, seconds, name="take a hold back") for call in calls))
        return not any(errors)

    async def expect(self) -> None:
        """Have servers fence workers left behind."""

        async def ask(server: ServerUpdate, client: SessionServerClient) -> None:
            server.weights = await client.expect(self._report.version)

        await self._at_every_server(UpdateStep.VERIFY, ask, self._budget.verify_s)

    def _note(self, step: UpdateStep, answers: Sequence[ServerAnswer]) -> None:
        for (server, _), answer in zip(self._servers, answers, strict=True):
            if answer.problems:
                server.errors[step] = "; ".join(answer.problems)

    async def _at_every_server(
        self, step: UpdateStep, ask: Callable[[ServerUpdate, SessionServerClient], Awaitable[None]], seconds: float
    ) -> None:
        attempts = (attempt(partial(ask, *each), seconds, name=f"{step} {each[0].url}") for each in self._servers)
        for (server, _), error in zip(self._servers, await asyncio.gather(*attempts), strict=True):
            if error is not None:
                server.errors[step] = error


class WeightUpdater:
    """Updater of the weights of `engines` under the sessions of `session_servers`.

    Args:
        engines: All workers, as `sglang=http://...`, `vllm=http://...`, `router=http://...`, an `EngineServer`
            of known kind, or an entered provider. Workers of a pool are updated one by one.
        session_servers: All servers of these engines' sessions.
        mode: ABORT ends generations and continues them with a prefill under the new weights, which scores what waits.
            KEEP freezes them: tokens of a request then have several versions, scored by sweeps only.
        budget: Time limits.
        unconsumed: The trainer's queue; the sweep replaces its samples, with engines given as providers.
    """

    def __init__(
        self,
        engines: Sequence[TokenProvider | EngineServer | str],
        session_servers: Sequence[SessionServerAddress | str],
        *,
        mode: PauseMode = PauseMode.ABORT,
        budget: UpdateBudget | None = None,
        unconsumed: MutableSequence[Sample] | None = None,
    ) -> None:
        self._engines = tuple(engines)
        self._addresses = tuple(session_servers)
        self._mode = mode
        self._budget = budget or UpdateBudget()
        self._unconsumed = unconsumed

    @asynccontextmanager
    async def update(self, version: int) -> AsyncIterator["WeightUpdate"]:
        """Sweep, pause, yield an update to weights `version`, and reopen.

        Before anything changes, raises `ScenarioError` for a version below the live one or a bad router,
        `EngineUnavailable` for a silent one.
        """
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(SessionServerClient(each)) for each in self._addresses]
            learned = await learn_workers(self._engines, self._addresses, self._budget.connect_s)
            engines = await reach(learned, stack, self._budget.connect_s)
            update = WeightUpdate(UpdateReport(version, self._mode), engines, clients, self._budget)
            await update.sweep(self._unconsumed)
            try:
                async with renew_holds(update.servers.gates):
                    await update.pause()
                    yield update
            finally:
                await to_the_end(update.reopen())
                log.info(WEIGHT_UPDATE_ENDED, problems=update.report.problems, **update.report.telemetry())


class WeightUpdate:
    def __init__(
        self, report: UpdateReport, engines: Engines, clients: Sequence[SessionServerClient], budget: UpdateBudget
    ) -> None:
        self.report = report
        self._engines = EnginesInUpdate(engines, report, budget)
        self.servers = ServersInUpdate(clients, report, budget)
        self._budget = budget
        self._has_begun = False
        self._has_engines = False
        """True if no other known update has paused the engines."""
        self._has_paused = False
        """True if this update may have paused engines."""

    async def sweep(self, unconsumed: MutableSequence[Sample] | None = None) -> None:
        """Score tokens that wait for the live version. Raises `ScenarioError` if a worker serves a later one."""
        with self._step(UpdateStep.SWEEP):
            version = await self._engines.read_live_version()
            self._engines.require_upwards()
            if version is None or not self._budget.sweep_s:
                return
            request = SweepRequest(version, self._budget.sweep_s, self._budget.sweep_concurrency)
            await asyncio.gather(self.servers.sweep(request), self._engines.sweep_samples(unconsumed, request))

    async def pause(self) -> None:
        """Shut the gates, then pause the engines, whose turns then wait.

        Raises `EngineUnavailable` if another update keeps the engines, `ScenarioError` if it brought a later version.
        """
        with self._step(UpdateStep.PAUSE_GATES):
            repeated = AsyncRetrying(
                retry=retry_if_result(lambda taken: taken is not None),
                wait=wait_random(*_ASK_AGAIN_S),
                stop=stop_after_delay(self._budget.turn_s),
                retry_error_callback=last_result,
            )
            # Every gate and the engines, or nothing: two updates never hold a part each.
            taken: str | None = await repeated(self._shut_gates)
            if taken is not None:
                raise EngineUnavailable(f"waited {self._budget.turn_s:g} s for another update to end: {taken}")
            self._has_engines = True
            if repeated.statistics["attempt_number"] > 1:
                await self._engines.read_live_version()
                self._engines.require_upwards()
        with self._step(UpdateStep.PAUSE_ENGINES):
            self._has_paused = True
            await self._engines.pause()

    async def _shut_gates(self) -> str | None:
        taken = await self.servers.pause()
        if taken is not None:
            await self._open_gates()  # do not block the update that has the engines
        return taken

    async def apply(self, source: Path | Transfer) -> None:
        """Have every worker serve new weights, from a checkpoint folder that it can read or by a transfer.

        Raises `EngineError` if none does, and `EngineUnavailable` first if the hold has expired.
        """
        lost = await self.servers.find_lost()
        if lost:
            raise EngineUnavailable(
                f"the hold of this update ran out at {', '.join(lost)}, so turns and engines continued: begin it again,"
                " and let the loop run, or take a longer hold_ttl_s"
            )
        self._has_begun, self.report.workers = True, ()
        with self._step(UpdateStep.APPLY):
            errors = await self._engines.load(source)
        with self._step(UpdateStep.VERIFY):
            await self._engines.verify(errors)
        if not self.report.updated:
            kept = "some workers serve no session" if self.report.unsettled else "the old weights are still served"
            raise EngineError(
                f"no worker serves weight version {self.report.version}, {kept}: {'; '.join(self.report.problems)}"
            )

    async def reopen(self) -> None:
        """Reopen everything but workers that missed the update."""
        async with renew_holds(self.servers.gates):
            if self._has_begun and not self.report.workers:  # the last attempt broke off, and may have reached some
                with self._step(UpdateStep.VERIFY):
                    await self._engines.verify({})
            with self._step(UpdateStep.CONTINUE):
                if self._has_engines and await self.servers.find_lost():
                    self._has_engines = await self.servers.take_back()
                if self._has_engines:
                    await self._engines.resume()
            if self.report.updated or self.report.unsettled:
                with self._step(UpdateStep.VERIFY):
                    await self.servers.expect()
        with self._step(UpdateStep.RESUME_GATES):
            await self._open_gates()

    async def _open_gates(self) -> None:
        # The servers continue engines that this update did not continue.
        are_continued = self._has_engines and UpdateStep.CONTINUE not in self.report.engine_errors
        await self.servers.resume(engines_continued=are_continued or not self._has_paused)

    @contextmanager
    def _step(self, step: UpdateStep) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.report.seconds[step] = self.report.seconds.get(step, 0.0) + time.monotonic() - began
