"""Changing the weights under running sessions: swept, paused, applied, verified, and always open again (I8).

    async with manager.updating_weights(3) as update:  # a `SessionManager` that knows its engines
        await update.apply(checkpoint)

`WeightUpdater` is the full form, for several session servers.

The sweep comes first, while turns go on: it scores what waits for the version that is about to disappear. Then gates
and engines pause, the block applies the weights, every worker says what it serves now, and everything opens again,
whatever happened in between, also when the caller is cancelled. A worker that missed the update serves nobody until a
later update has reached it. An update that no worker took is an error, and the old weights go on serving. Versions only
go up, because a worker with a lower one than another has missed an update.

This is the order of an update, and what it may not forget. The questions to the workers are in `weight_workers.py`,
those to the session servers in `weight_servers.py`, the report is in `weights_report.py`. Does not transfer weights by
itself: `apply` takes a checkpoint that the engines can read, or a function that knows how.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, MutableSequence, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_random

from harness.client.connections import SessionServerAddress
from harness.client.session_server import SessionServerClient
from harness.control.engines import EngineServer
from harness.control.routed_engines import learn_workers
from harness.control.weight_servers import ServersInUpdate
from harness.control.weight_workers import Engines, EnginesInUpdate, Transfer, reach
from harness.control.weights_report import UpdateBudget, UpdateReport, UpdateStep
from harness.engines.base import PauseMode, TokenProvider
from harness.errors import (
    EngineError,
    EngineUnavailable,
)
from harness.machine.deadlines import last_result, to_the_end
from harness.machine.log import get_logger
from harness.sessions.weights.weight_update import SweepRequest
from harness.types import Sample

WEIGHT_UPDATE_ENDED = "weight_update_ended"

_ASK_AGAIN_S = (0.2, 1.0)  # uneven, so that two updates which stand in each other's way do not go on doing so

log = get_logger(__name__)


class WeightUpdater:
    """Updates the weights of `engines` under the sessions of `session_servers`.

    Args:
        engines: Workers, all of them: `sglang=http://...` and `vllm=http://...` for engine servers, an `EngineServer`
            of a known kind, `router=http://...` for every worker of a `harness router`, or entered providers; the
            workers of a pool are updated one by one.
        session_servers: All servers whose sessions these engines serve.
        mode: The fate of generations in flight. ABORT: they end, go on after the update with a prefill under the
            new weights, and that prefill scores what waits for them. KEEP: they freeze and go on without being
            scored; tokens of one request then have several versions, and their proximal values come from sweeps only.
        budget: How long each step may take.
        unconsumed: Samples that have left their sessions and are not trained yet: the trainer's queue. The sweep
            replaces those that it can score, by the engines given as providers.
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
        """From the sweep to open gates; the block in between applies the weights of `version`.

        Raises `ScenarioError` for a version below the live one, and for a router that is none, or `EngineUnavailable`
        for one that does not answer or whose workers cannot be reached from here, before anything is touched; and what
        the block raises, after everything has been opened again.
        """
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(SessionServerClient(each)) for each in self._addresses]
            learned = await learn_workers(self._engines, self._addresses, self._budget.connect_s)
            engines = await reach(learned, stack, self._budget.connect_s)
            update = WeightUpdate(UpdateReport(version, self._mode), engines, clients, self._budget)
            await update.sweep(self._unconsumed)
            try:
                async with update.renew_holds():
                    await update.pause()
                    yield update
            finally:
                await to_the_end(update.reopen())
                log.info(WEIGHT_UPDATE_ENDED, problems=update.report.problems, **update.report.telemetry())


class WeightUpdate:
    """One update under way."""

    def __init__(
        self,
        report: UpdateReport,
        engines: Engines,
        clients: Sequence[SessionServerClient],
        budget: UpdateBudget,
    ) -> None:
        self.report = report
        self._engines = EnginesInUpdate(engines, report, budget)
        self._servers = ServersInUpdate(clients, report, budget)
        self._budget = budget
        self._has_begun = False
        self._has_engines = False
        """No other update that the session servers know of has paused them."""
        self._has_paused = False
        """Some engines may stand still because of this update."""

    async def sweep(self, unconsumed: MutableSequence[Sample] | None = None) -> None:
        """Every session server scores what waits for the live version, and this process what it holds itself.

        Raises `ScenarioError` when a worker serves a later version than the one to come.
        """
        with self._step(UpdateStep.SWEEP):
            version = await self._engines.read_live_version()
            self._engines.require_upwards()
            if version is None or not self._budget.sweep_s:
                return
            request = SweepRequest(version, self._budget.sweep_s, self._budget.sweep_concurrency)
            await asyncio.gather(self._servers.sweep(request), self._engines.sweep_samples(unconsumed, request))

    def renew_holds(self) -> AbstractAsyncContextManager[None]:
        """The holds of this update last as long as the block."""
        return self._servers.renew_holds()

    async def pause(self) -> None:
        """Hold new turns first, so that whatever the engines end finds its gate closed and waits there.

        Every gate is shut and the engines are this update's, or nothing is: two updates never hold a part of them each.
        Raises `EngineUnavailable` when another update has the engines for longer than the budget allows to wait, and
        `ScenarioError` when the one that was waited for has brought a later version.
        """
        with self._step(UpdateStep.PAUSE_GATES):
            repeated = AsyncRetrying(
                retry=retry_if_result(lambda taken: taken is not None),
                wait=wait_random(*_ASK_AGAIN_S),
                stop=stop_after_delay(self._budget.turn_s),
                retry_error_callback=last_result,
            )
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
        """Why the gates are another update's, in whose way this one does not stand; None when they are shut."""
        taken = await self._servers.pause()
        if taken is not None:
            await self._open_gates()
        return taken

    async def apply(self, source: Path | Transfer) -> None:
        """Have every worker serve the new weights: a checkpoint in a folder that it can read, or a transfer.

        Raises `EngineError` when no worker serves them afterwards, and what a transfer raises; `EngineUnavailable`,
        before anything is touched, when the hold of this update has run out.
        """
        lost = await self._servers.find_lost()
        if lost:
            raise EngineUnavailable(
                f"the hold of this update ran out at {', '.join(lost)}, so turns and engines went on: begin it again,"
                " and let the loop run, or take a longer hold_ttl_s"
            )
        self._has_begun, self.report.workers = True, ()
        with self._step(UpdateStep.APPLY):
            errors = await self._engines.load(source)
        with self._step(UpdateStep.VERIFY):
            await self._engines.verify(errors)
        if not self.report.updated:
            kept = "some workers serve nobody" if self.report.unsettled else "the old weights go on serving"
            raise EngineError(
                f"no worker serves weight version {self.report.version}, {kept}: {'; '.join(self.report.problems)}"
            )

    async def reopen(self) -> None:
        """Everything works again, without the workers that the update missed or broke off in."""
        async with self.renew_holds():
            if self._has_begun and not self.report.workers:  # the last attempt broke off, and may have reached some
                with self._step(UpdateStep.VERIFY):
                    await self._engines.verify({})
            with self._step(UpdateStep.CONTINUE):
                if self._has_engines and await self._servers.find_lost():
                    self._has_engines = await self._servers.take_back()
                if self._has_engines:
                    await self._engines.resume()
            if self.report.updated or self.report.unsettled:
                with self._step(UpdateStep.VERIFY):
                    await self._servers.expect()
        with self._step(UpdateStep.RESUME_GATES):
            await self._open_gates()

    async def _open_gates(self) -> None:
        """Release the holds; engines that were not continued by this update are the servers' to continue."""
        are_continued = self._has_engines and UpdateStep.CONTINUE not in self.report.engine_errors
        await self._servers.resume(engines_continued=are_continued or not self._has_paused)

    @contextmanager
    def _step(self, step: UpdateStep) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.report.seconds[step] = self.report.seconds.get(step, 0.0) + time.monotonic() - began
