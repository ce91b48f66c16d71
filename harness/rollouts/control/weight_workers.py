"""Workers of a weight update: providers of this process, and servers by address, which generate nothing here."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from harness.engines.base import EngineWorkers, ExpectsTransfer, LogprobScale, TokenProvider
from harness.engines.kinds import server_kinds
from harness.engines.pool.workers import fence_left_behind
from harness.errors import EngineError, EngineUnavailable, ScenarioError, UnknownWeightVersion
from harness.machine.deadlines import attempt, persist
from harness.rollouts.control.engines import EngineServer, SilentEngine, as_server
from harness.rollouts.control.sample_sweep import sweep_samples
from harness.rollouts.control.weights_report import UpdateBudget, UpdateReport, UpdateStep, WorkerUpdate
from harness.samples.versions import is_unsettled, is_version, known_version, policy_version
from harness.sessions.weights.weight_update import SweepRequest
from harness.types import Sample
from server_patch.repeat_terminate import RepeatTerminateConfig

Transfer = Callable[[Mapping[str, TokenProvider], str], Awaitable[None]]
"""Function that brings new weights, under this label, to all workers, by name; they are paused.

It must leave no KV cache of the old weights. SGLang's update verbs flush by default; vLLM's `/finish_weight_update`
does not, `/reset_prefix_cache` does.
"""

_VOCAB_SIZE = 2**31 - 1  # no ids are sent
_NO_GUARD = RepeatTerminateConfig()  # ignores the environment, because proving a guard would generate tokens


class Engines(NamedTuple):
    reached: dict[str, TokenProvider]
    """Engines by address, or by index in the input."""
    errors: list[str]


async def reach(
    engines: Sequence[TokenProvider | EngineServer | SilentEngine | str], stack: AsyncExitStack, seconds: float
) -> Engines:
    """Connect `engines` until `stack` exits. Raises `ScenarioError`, `EngineUnavailable` if all are silent."""
    silent = [engine for engine in engines if isinstance(engine, SilentEngine)]
    if silent and len(silent) == len(engines):
        raise EngineUnavailable("; ".join(f"{engine.name}: {engine.error}" for engine in silent))
    found: dict[str, TokenProvider] = {}
    addressed: dict[str, TokenProvider] = {}
    for index, engine in enumerate(engines):
        if isinstance(engine, SilentEngine):
            continue
        if isinstance(engine, str | EngineServer):
            name = engine if isinstance(engine, str) else engine.name
            found[name] = addressed[name] = _control(engine)
        else:
            found[str(index)] = engine

    async def connect(address: str, provider: TokenProvider) -> str | None:
        stack.push_async_exit(provider)  # before entering, so that a failed entry is cleaned up too
        return await attempt(provider.__aenter__, seconds, name=f"connect to {address}")

    problems = await asyncio.gather(*(connect(*each) for each in addressed.items()))
    errors = {address: problem for address, problem in zip(addressed, problems, strict=True) if problem is not None}
    reached = {name: engine for name, engine in found.items() if name not in errors}
    errors |= {engine.name: engine.error for engine in silent}
    return Engines(reached, [f"{address}: {problem}" for address, problem in errors.items()])


def _control(engine: EngineServer | str) -> TokenProvider:
    kinds, server = server_kinds(), as_server(engine) if isinstance(engine, str) else engine
    if server.kind is None or not server.url:
        raise ScenarioError(f"expected {' or '.join(f'{name}=URL' for name in kinds)}, got {engine!r}")
    return kinds[server.kind].open(
        server.url,
        vocab_size=_VOCAB_SIZE,
        logprob_scale=LogprobScale.AFTER_TEMPERATURE,
        repeat_guard=_NO_GUARD,
        api_key=server.api_key,
    )


async def _expect(provider: TokenProvider, label: str) -> None:
    if isinstance(provider, ExpectsTransfer):
        await provider.expect_transfer(label)


class _Worker(NamedTuple):
    name: str
    provider: TokenProvider
    among: EngineWorkers
    """Workers of the pool that serves it."""
    place: str


class EnginesInUpdate:
    def __init__(self, engines: Engines, report: UpdateReport, budget: UpdateBudget) -> None:
        self._engines = engines.reached
        self._report = report
        self._budget = budget
        for error in engines.errors:
            report.note(UpdateStep.SWEEP, error)

    async def read_live_version(self) -> int | None:
        """Return the version to replace, or None."""
        await self._at_every_engine(UpdateStep.SWEEP, lambda e: e.read_version(), self._budget.verify_s)
        try:
            return max(policy_version(engine.weight_version) for engine in self._engines.values())
        except (UnknownWeightVersion, ValueError) as error:  # the latter: there is no engine
            self._report.note(UpdateStep.SWEEP, str(error))
            return None

    def require_upwards(self) -> None:
        """Raise `ScenarioError` if a worker serves a later version."""
        # The lower of two versions counts as left behind, so going back would fence the other workers.
        found = (known_version(worker.provider.weight_version) for worker in self._workers())
        newest = max((version for version in found if version is not None), default=0)
        if self._report.version < newest:
            raise ScenarioError(
                f"expected weight version {newest}, which is live, or a later one, got {self._report.version}: label"
                f" new weights upwards, {newest + 1} is next; a trainer that restarts its count starts new engines"
            )

    async def sweep_samples(self, unconsumed: MutableSequence[Sample] | None, request: SweepRequest) -> None:
        """Score samples that have left their sessions."""
        if not unconsumed:
            return
        try:
            self._report.samples = await sweep_samples(list(self._engines.values()), unconsumed, request)
        except EngineError as error:
            self._report.note(UpdateStep.SWEEP, error.message)

    async def pause(self) -> None:
        mode = self._report.mode
        await self._at_every_engine(UpdateStep.PAUSE_ENGINES, lambda e: e.pause(mode), self._budget.pause_s)

    async def load(self, source: Path | Transfer) -> Mapping[str, str | None]:
        """Load the weights on every worker. Return errors by worker."""
        workers, label = list(self._workers()), str(self._report.version)
        if not isinstance(source, Path):
            # A transfer that breaks off must not leave its weights under the old label.
            unlabeled = await self._at_every_worker(lambda provider: _expect(provider, label), self._budget.pause_s)
            for name, error in unlabeled.items():
                if error is not None:
                    self._report.note(UpdateStep.APPLY, f"worker {name} keeps its label during the transfer: {error}")
            async with asyncio.timeout(self._budget.apply_s):
                await source({worker.name: worker.provider for worker in workers}, label)
            return {}
        return await self._at_every_worker(
            lambda provider: provider.update_weights(source, label), self._budget.apply_s
        )

    async def verify(self, load_errors: Mapping[str, str | None]) -> None:
        """Read every version. If any worker has the new one, fence the others."""
        silent = await self._at_every_worker(lambda provider: provider.read_version(), self._budget.verify_s)
        workers, found = {worker.name: worker for worker in self._workers()}, {}
        for name, worker in workers.items():
            label, error = worker.provider.weight_version, None
            if not is_version(label, self._report.version):
                said = f"it reports weight version {label!r}, expected {str(self._report.version)!r}"
                error = "; ".join(filter(None, (silent.get(name) or load_errors.get(name), said)))
            found[name] = WorkerUpdate(name, label, error)
        if any(each.error is None for each in found.values()):
            # Only workers of this process: servers fence the ones that they place requests on.
            for engine in self._engines.values():
                fence_left_behind(engine.workers, self._report.version)
            for name, each in found.items():
                worker = workers[name]
                is_fenced = any(status.fence for status in worker.among if status.name == worker.place)
                found[name] = replace(each, is_fenced=each.error is not None and is_fenced)
        self._report.workers = tuple(found.values())

    async def resume(self) -> None:
        async def ask(engine: TokenProvider) -> str | None:
            # Retrying cannot help an engine whose weights are unknown.
            go_on = attempt if is_unsettled(engine.weight_version) else persist
            return await go_on(engine.resume, self._budget.continue_s, name="continue engine")

        errors = await asyncio.gather(*(ask(engine) for engine in self._engines.values()))
        for name, error in zip(self._engines, errors, strict=True):
            if error is not None:
                self._report.note(UpdateStep.CONTINUE, f"engine {name}: {error}")

    def _workers(self) -> Iterator[_Worker]:
        for name, engine in self._engines.items():
            workers = engine.workers
            yield from (_Worker(place or name, each, workers, place) for place, each in workers.providers.items())

    async def _at_every_worker(
        self, verb: Callable[[TokenProvider], Awaitable[object]], seconds: float
    ) -> dict[str, str | None]:
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
            self._report.note(step, error)
