"""Changing the weights under running sessions: swept, paused, applied, verified, and always open again (I8).

    async with manager.updating_weights(3) as update:  # a `SessionManager` that knows its engines
        await update.apply(checkpoint)

`WeightUpdater` is the full form, for several session servers.

The sweep comes first, while turns go on: it scores what waits for the version that is about to disappear. Then gates
and engines pause, the block applies the weights, every worker says what it serves now, and everything opens again,
whatever happened in between, also when the caller is cancelled. A worker that missed the update serves nobody until a
later update has reached it. An update that no worker took is an error, and the old weights go on serving. Versions only
go up, because a worker with a lower one than another has missed an update.

What counts as a problem and what is reported is in `weights_report.py`. Does not transfer weights by itself: `apply`
takes a checkpoint that the engines can read, or a function that knows how.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from harness.client.connections import SessionServerAddress
from harness.client.gate import GateClient, new_holder, renewed
from harness.client.session_server import SessionServerClient
from harness.control.engines import EngineServer
from harness.control.sample_sweep import sweep_samples
from harness.control.weight_workers import Engines, reach
from harness.control.weights_report import ServerUpdate, UpdateBudget, UpdateReport, UpdateStep, WorkerUpdate
from harness.engines.base import EngineWorkers, PauseMode, TokenProvider
from harness.engines.pool.workers import MISSED_UPDATE
from harness.errors import (
    EngineError,
    EnginesHeld,
    EngineUnavailable,
    ScenarioError,
    SessionServerError,
    UnknownWeightVersion,
)
from harness.machine.deadlines import attempt, persist, to_the_end
from harness.samples.versions import is_unsettled, is_version, known_version, policy_version
from harness.sessions.weight_update import SweepRequest
from harness.types import Sample

WEIGHT_UPDATE_ENDED = "weight_update_ended"

_ASK_AGAIN_S = (0.2, 1.0)  # uneven, so that two updates which stand in each other's way do not go on doing so

log = structlog.get_logger(__name__)

Transfer = Callable[[Mapping[str, TokenProvider], str], Awaitable[None]]
"""Brings new weights to all workers, by name, and labels them with the version: an in-cluster transfer.

Engines are paused while it runs. It must leave no KV cache of the old weights: SGLang's update verbs flush by default,
vLLM's `/finish_weight_update` does not, `/reset_prefix_cache` does.
"""


class _Worker(NamedTuple):
    name: str
    """As the report calls it."""
    provider: TokenProvider
    among: EngineWorkers
    """Of the provider that places requests on it, in this process."""
    place: str
    """Its name among those."""


class WeightUpdater:
    """Updates the weights of `engines` under the sessions of `session_servers`.

    Args:
        engines: Workers, all of them: `sglang=http://...` and `vllm=http://...` for engine servers (not a router, which
            passes no control on), an `EngineServer` of a known kind, or entered providers; the workers of a pool are
            updated one by one.
        session_servers: All servers whose sessions these engines serve.
        mode: What happens to generations in flight. ABORT: they end, go on after the update with a prefill under the
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

        Raises `ScenarioError` for a version below the live one, before anything is touched, and what the block raises,
        after everything has been opened again.
        """
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(SessionServerClient(each)) for each in self._addresses]
            engines = await reach(self._engines, stack, self._budget.connect_s)
            update = WeightUpdate(UpdateReport(version, self._mode), engines, clients, self._budget)
            await update.sweep(self._unconsumed)
            try:
                async with update.renewed():
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
        report.servers = tuple(ServerUpdate(client.address.url) for client in clients)
        self._engines = engines.reached
        for error in engines.errors:
            self._note(UpdateStep.SWEEP, error)
        self._servers = tuple(zip(report.servers, clients, strict=True))
        holder = new_holder("update")
        self._gates = tuple(client.gate(holder, budget.hold_ttl_s) for client in clients)
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
            version = await self._live_version()
            self._require_upwards()
            if version is None or not self._budget.sweep_s:
                return
            request = SweepRequest(version, self._budget.sweep_s, self._budget.sweep_concurrency)

            async def ask(server: ServerUpdate, client: SessionServerClient) -> None:
                server.sweep = await client.sweep(request)

            longest_s = self._budget.sweep_s + self._budget.gate_s
            await asyncio.gather(
                self._at_every_server(UpdateStep.SWEEP, [partial(ask, *each) for each in self._servers], longest_s),
                self._sweep_samples(unconsumed, request),
            )

    def renewed(self) -> AbstractAsyncContextManager[None]:
        """The holds of this update last as long as the block."""
        return renewed(self._gates)

    async def pause(self) -> None:
        """Hold new turns first, so that whatever the engines end finds its gate closed and waits there.

        Raises `EngineUnavailable` when another update has the engines for longer than the budget allows to wait, and
        `ScenarioError` when the one that was waited for has brought a later version.
        """
        with self._step(UpdateStep.PAUSE_GATES):
            await self._take_turn()
        with self._step(UpdateStep.PAUSE_ENGINES):
            self._has_paused = True
            mode = self.report.mode
            await self._at_every_engine(UpdateStep.PAUSE_ENGINES, lambda e: e.pause(mode), self._budget.pause_s)

    async def _take_turn(self) -> None:
        """Every gate is shut, and the engines are this update's. Two updates never hold a part of them each."""
        until, has_waited = time.monotonic() + self._budget.turn_s, False
        while (taken := await self._shut_gates()) is not None:
            await self._open_gates()
            if time.monotonic() >= until:
                raise EngineUnavailable(f"waited {self._budget.turn_s:g} s for another update to end: {taken}")
            has_waited = True
            await asyncio.sleep(random.uniform(*_ASK_AGAIN_S))  # noqa: S311  # nothing secret
        self._has_engines = True
        if has_waited:
            await self._live_version()
            self._require_upwards()

    async def _shut_gates(self) -> str | None:
        """Why the engines are somebody else's at one of the servers, None when they are not."""
        taken: list[str] = []

        async def pause(gate: GateClient) -> None:
            try:
                await gate.pause(deadline_s=self._budget.gate_s, engines=True)
            except SessionServerError as error:
                if error.code != EnginesHeld.code:
                    raise
                taken.append(f"{gate.url}: {error.message}")

        await self._at_every_gate(UpdateStep.PAUSE_GATES, pause)
        return taken[0] if taken else None

    async def _open_gates(self) -> None:
        """Release the holds; engines that were not continued by this update are the servers' to continue."""
        are_continued = self._has_engines and UpdateStep.CONTINUE not in self.report.engine_errors
        is_done = are_continued or not self._has_paused

        async def resume(gate: GateClient) -> None:
            await gate.resume(deadline_s=self._budget.gate_s, engines_continued=is_done)

        await self._at_every_gate(UpdateStep.RESUME_GATES, resume)

    async def apply(self, source: Path | Transfer) -> None:
        """Have every worker serve the new weights: a checkpoint in a folder that it can read, or a transfer.

        Raises `EngineError` when no worker serves them afterwards, and what a transfer raises; `EngineUnavailable`,
        before anything is touched, when the hold of this update has run out.
        """
        await self._require_held()
        self._has_begun, self.report.workers = True, ()
        with self._step(UpdateStep.APPLY):
            errors = await self._load(source, str(self.report.version))
        await self._verify(errors)
        if not self.report.updated:
            kept = "some workers serve nobody" if self.report.unsettled else "the old weights go on serving"
            raise EngineError(
                f"no worker serves weight version {self.report.version}, {kept}: {'; '.join(self.report.problems)}"
            )

    async def reopen(self) -> None:
        """Everything works again, without the workers that the update missed or broke off in."""
        async with self.renewed():
            if self._has_begun and not self.report.workers:  # the last attempt broke off, and may have reached some
                await self._verify({})
            with self._step(UpdateStep.CONTINUE):
                await self._continue_engines()
            if self.report.updated or self.report.unsettled:
                await self._tell_servers()
        with self._step(UpdateStep.RESUME_GATES):
            await self._open_gates()

    async def _require_held(self) -> None:
        """The gates are still shut by this update, so the engines are still its own."""
        lost = await self._lost_gates()
        if lost:
            raise EngineUnavailable(
                f"the hold of this update ran out at {', '.join(lost)}, so turns and engines went on: begin it again,"
                " and let the loop run, or take a longer hold_ttl_s"
            )

    async def _lost_gates(self) -> list[str]:
        """Where the hold of this update ran out before it was renewed, as the servers say now."""
        seconds = self._budget.gate_s
        held = (gate for gate in self._gates if gate.is_held)
        await asyncio.gather(
            *(attempt(partial(gate.renew, deadline_s=seconds), seconds, name="renew a hold") for gate in held)
        )
        return [gate.url for gate in self._gates if gate.is_lost]

    async def _continue_engines(self) -> None:
        """Ask every engine until it goes on or the budget ends."""
        if self._has_engines and await self._lost_gates():
            self._has_engines = await self._is_taken_back()
        if not self._has_engines:
            return
        errors = await asyncio.gather(*(self._continue(engine) for engine in self._engines.values()))
        for name, error in zip(self._engines, errors, strict=True):
            if error is not None:
                self._note(UpdateStep.CONTINUE, f"engine {name}: {error}")

    async def _is_taken_back(self) -> bool:
        """Whether the servers where the hold was lost have let this update have the engines again.

        Where it ran out they continue them, where another update has them they are its own. A server that was started
        without its store knows of neither, and would leave them paused for ever.
        """
        seconds = self._budget.gate_s
        lost = (gate for gate in self._gates if gate.is_lost)
        calls = (partial(gate.pause, deadline_s=seconds, engines=True) for gate in lost)
        errors = await asyncio.gather(*(attempt(call, seconds, name="take a hold back") for call in calls))
        return not any(errors)

    async def _continue(self, engine: TokenProvider) -> str | None:
        """Why the engine does not go on; one whose weights nobody knows will not, however often it is asked."""
        ask = attempt if is_unsettled(engine.weight_version) else persist
        return await ask(engine.resume, self._budget.continue_s, name="continue engine")

    async def _load(self, source: Path | Transfer, label: str) -> Mapping[str, str | None]:
        """Why each worker could not load, where that is known."""
        workers = list(self._workers())
        if not isinstance(source, Path):
            async with asyncio.timeout(self._budget.apply_s):
                await source({worker.name: worker.provider for worker in workers}, label)
            return {}
        return await self._at_every_worker(
            lambda provider: provider.update_weights(source, label), self._budget.apply_s
        )

    async def _verify(self, load_errors: Mapping[str, str | None]) -> None:
        """Every worker says what it serves; when some serve the version, the others are fenced."""
        with self._step(UpdateStep.VERIFY):
            silent = await self._at_every_worker(lambda provider: provider.read_version(), self._budget.verify_s)
        workers = {worker.name: worker for worker in self._workers()}
        found = {
            name: self._judged(worker, silent.get(name) or load_errors.get(name)) for name, worker in workers.items()
        }
        if any(each.error is None for each in found.values()):
            found = {name: _fenced(each, workers[name]) for name, each in found.items()}
        self.report.workers = tuple(found.values())

    async def _tell_servers(self) -> None:
        """Servers with providers of their own see for themselves, and fence what was left behind."""

        async def ask(server: ServerUpdate, client: SessionServerClient) -> None:
            server.weights = await client.expect(self.report.version)

        with self._step(UpdateStep.VERIFY):
            calls = [partial(ask, *each) for each in self._servers]
            await self._at_every_server(UpdateStep.VERIFY, calls, self._budget.verify_s)

    def _judged(self, worker: _Worker, error: str | None) -> WorkerUpdate:
        label = worker.provider.weight_version
        if is_version(label, self.report.version):
            return WorkerUpdate(worker.name, label)
        said = f"it reports weight version {label!r}, expected {str(self.report.version)!r}"
        return WorkerUpdate(worker.name, label, said if error is None else f"{error}; {said}")

    async def _sweep_samples(self, unconsumed: MutableSequence[Sample] | None, request: SweepRequest) -> None:
        if not unconsumed:
            return
        try:
            self.report.samples = await sweep_samples(list(self._engines.values()), unconsumed, request)
        except EngineError as error:
            self._note(UpdateStep.SWEEP, error.message)

    async def _live_version(self) -> int | None:
        """The version that is about to be replaced; None when the engines cannot say."""
        await self._at_every_engine(UpdateStep.SWEEP, lambda e: e.read_version(), self._budget.verify_s)
        try:
            return max(policy_version(engine.weight_version) for engine in self._engines.values())
        except (UnknownWeightVersion, ValueError) as error:  # the latter: there is no engine
            self._note(UpdateStep.SWEEP, str(error))
            return None

    def _require_upwards(self) -> None:
        """Of two workers the one with the lower version counts as left behind, so going back would fence the others."""
        found = (known_version(worker.provider.weight_version) for worker in self._workers())
        newest = max((version for version in found if version is not None), default=0)
        if self.report.version < newest:
            raise ScenarioError(
                f"expected weight version {newest}, which is live, or a later one, got {self.report.version}: label new"
                f" weights upwards, {newest + 1} is next; a trainer that starts counting anew starts new engines"
            )

    def _workers(self) -> Iterator[_Worker]:
        for name, engine in self._engines.items():
            workers = engine.workers
            yield from (_Worker(place or name, each, workers, place) for place, each in workers.providers.items())

    async def _at_every_worker(
        self, verb: Callable[[TokenProvider], Awaitable[object]], seconds: float
    ) -> dict[str, str | None]:
        """By worker, why it did not do `verb`."""
        workers = list(self._workers())
        errors = await asyncio.gather(
            *(attempt(partial(verb, each.provider), seconds, name=f"worker {each.name}") for each in workers)
        )
        return {worker.name: error for worker, error in zip(workers, errors, strict=True)}

    async def _at_every_engine(
        self, step: UpdateStep, verb: Callable[[TokenProvider], Awaitable[object]], seconds: float
    ) -> None:
        calls = (attempt(partial(verb, engine), seconds, name=f"{step} engine") for engine in self._engines.values())
        for error in filter(None, await asyncio.gather(*calls)):
            self._note(step, error)

    async def _at_every_gate(self, step: UpdateStep, verb: Callable[[GateClient], Awaitable[object]]) -> None:
        await self._at_every_server(step, [partial(verb, gate) for gate in self._gates], self._budget.gate_s)

    async def _at_every_server(
        self, step: UpdateStep, calls: Sequence[Callable[[], Awaitable[object]]], seconds: float
    ) -> None:
        """Make one of `calls` at each server, in their order."""
        attempts = (
            attempt(call, seconds, name=f"{step} {server.url}")
            for (server, _), call in zip(self._servers, calls, strict=True)
        )
        for (server, _), error in zip(self._servers, await asyncio.gather(*attempts), strict=True):
            if error is not None:
                server.errors[step] = error

    def _note(self, step: UpdateStep, error: str) -> None:
        self.report.engine_errors.setdefault(step, []).append(error)

    @contextmanager
    def _step(self, step: UpdateStep) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.report.seconds[step] = self.report.seconds.get(step, 0.0) + time.monotonic() - began


def _fenced(update: WorkerUpdate, worker: _Worker) -> WorkerUpdate:
    """A worker of a pool that missed the weights serves nobody until it has them; others are fenced by servers."""
    if update.error is not None:
        worker.among.fence(worker.place, MISSED_UPDATE)
    fence = next((each.fence for each in worker.among if each.name == worker.place), "")
    if update.error is None and fence == MISSED_UPDATE:
        worker.among.unfence(worker.place)
    return replace(update, is_fenced=update.error is not None and bool(fence))
