"""Change weights while a scenario runs: `[weights]` in `scenario.toml`.

Updates wait for their moment, seen in the server's list of sessions, and proceed like a trainer's. Checkpoints are made
beforehand and stay in the run directory, so that every logprob can be verified.

Samples of finished rollouts wait meanwhile, like a trainer's queue that is never consumed: the server does not sweep
deleted sessions. So each update scores the tokens that wait here, and a last sweep those that wait for the final ones.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field

import msgspec

from harness.engines.base import LogprobScale, PauseMode
from harness.errors import EngineError, ScenarioError, SessionServerError
from harness.lab.models.weight_files import perturb_checkpoint
from harness.machine.deadlines import beside, within
from harness.rollouts.client.session_server import SessionServerClient, SessionSummary
from harness.rollouts.control.sample_sweep import sweep_samples
from harness.rollouts.control.weights import WeightUpdater
from harness.rollouts.control.weights_report import UpdateBudget
from harness.rollouts.manager import SessionManager
from harness.samples.codec import sample_to_json
from harness.samples.versions import known_version
from harness.sessions.weights.weight_update import SweepRequest
from harness.suite.record.rollout_table import RolloutLog
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.services import OwnServices, Services
from harness.suite.scenarios.scenario import PlannedUpdate, Weights
from harness.types import Json, Sample

_COLLECTED_EVERY_S = 0.02
_LOOK_EVERY_S = 0.1


class FinishedSamples:
    """Samples of one scenario."""

    def __init__(self, manager: SessionManager, log: RolloutLog) -> None:
        self.samples: list[Sample] = []
        """Queued samples; a sweep may replace them one by one."""
        self._manager = manager
        self._log = log
        self._numbers: list[int] = []
        """Rollout of each sample."""
        self._recorded: list[Sample | None] = []
        """Samples as they were recorded; None before the record is written."""

    def add(self, number: int, samples: Sequence[Sample]) -> None:
        """Queue a rollout's samples. Do not await between the manager's return and this call."""
        self.samples += samples
        self._numbers += [number] * len(samples)
        self._recorded += [None] * len(samples)

    def record(self, number: int) -> tuple[Sample, ...]:
        """Return a rollout's samples for its record, and mark them recorded."""
        places = [place for place, each in enumerate(self._numbers) if each == number]
        for place in places:
            self._recorded[place] = self.samples[place]
        return tuple(self.samples[place] for place in places)

    async def catch_up(self, *, deadline_s: float) -> int:
        """Wait for sessions being collected. Returns how many are late."""
        # Meanwhile neither server nor queue has their final samples, so a sweep must wait for them.
        missing = set(self._manager.collecting)

        async def arrive() -> None:
            while missing & self._manager.collecting:  # noqa: ASYNC110  # the manager has no event
                await asyncio.sleep(_COLLECTED_EVERY_S)

        await within(deadline_s, arrive())
        return len(missing & self._manager.collecting)

    def write(self) -> None:
        """Update the records of samples scored since. Raises `StoreError`."""
        kept = zip(self._numbers, self._recorded, self.samples, strict=True)
        scored = {number for number, recorded, now in kept if recorded is not None and recorded is not now}
        for number in sorted(scored):
            self._log.amend(number, [sample_to_json(sample) for sample in self.record(number)])


@asynccontextmanager
async def change_weights(
    weights: Weights | None,
    services: Services,
    finished: FinishedSamples | None,
    directory: RunDirectory,
    say: Callable[[str], None],
) -> AsyncIterator[None]:
    """Carry out the updates of `weights` in order during the block; those not due by its end are skipped.

    Sweeps `finished` samples before each update and after the block. Raises `ScenarioError` at the start unless the
    engines are at version 0, and errors of updates at the end.
    """
    if weights is None or finished is None:
        yield
        return
    assert isinstance(services, OwnServices), "a server that others use keeps its weights"
    if known_version(services.engine.weight_version):  # workers that were running may have had updates
        raise ScenarioError(
            f"weights: expected engines at version 0, for the n-th update brings version n; they serve version"
            f" {services.engine.weight_version}: load the first weights as version 0, or restart the engines"
        )
    say(f"making {len(weights.updates)} checkpoints in {directory.checkpoints}")

    def make_checkpoints() -> None:
        for number in range(1, len(weights.updates) + 1):
            target = directory.checkpoints / str(number)
            perturb_checkpoint(services.model_dir, target.resolve(), number=number, noise=weights.noise)

    await asyncio.to_thread(make_checkpoints)
    schedule = _Schedule(weights, services, finished, directory, say)
    async with beside(schedule.run(), name="weight schedule"):
        yield
    await schedule.settle_the_last()


@dataclass(slots=True)
class _Watch:
    turns_of: dict[str, int] = field(default_factory=dict)
    live: list[SessionSummary] = field(default_factory=list)
    was_in_flight: set[str] = field(default_factory=set)
    """Sessions with a turn in flight in the last two looks."""
    ended: int = 0

    def look(self, sessions: list[SessionSummary]) -> None:
        now = {each.session_id for each in sessions}
        self.ended += sum(each.session_id not in now for each in self.live)
        before = {each.session_id for each in self.live if each.turns_in_flight}
        self.was_in_flight = before & {each.session_id for each in sessions if each.turns_in_flight}
        self.live = sessions
        self.turns_of |= {each.session_id: each.turns for each in sessions}

    @property
    def turns(self) -> int:
        return sum(self.turns_of.values())

    def is_time(self, update: PlannedUpdate, since: "_Watch") -> bool:
        """Return True if `update` is due; `since` is the state after the previous one."""
        if self.turns < since.turns + update.after_turns:
            return False
        match update.when:
            case "in_turn":
                return bool(self.was_in_flight)
            case "in_tool_call":
                return any(each.turns and not each.turns_in_flight for each in self.live)
            case "session_ended":
                return self.ended > since.ended


@dataclass
class _Schedule:
    weights: Weights
    services: OwnServices
    finished: FinishedSamples
    directory: RunDirectory
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._can_score = self.services.engine.capabilities.logprob_scale is LogprobScale.RAW
        self._budget = UpdateBudget(sweep_s=self.weights.sweep_s)
        self._updater = WeightUpdater(
            [self.services.engine],
            [self.services.address],
            mode=PauseMode(self.weights.mode),
            budget=self._budget,
            unconsumed=self.finished.samples if self._can_score else None,
        )
        self._began = time.monotonic()
        self._reports: list[Json] = []

    async def run(self) -> None:
        watch = _Watch()
        async with SessionServerClient(self.services.address) as server:
            for version, update in enumerate(self.weights.updates, start=1):
                since = _Watch(dict(watch.turns_of), ended=watch.ended)
                watch.look(await server.sessions())
                while not watch.is_time(update, since):
                    await asyncio.sleep(_LOOK_EVERY_S)
                    watch.look(await server.sessions())
                # A session collected after this sweep has met the live version.
                await self._sweep_sessions(server)
                late = await self.finished.catch_up(deadline_s=self._budget.sweep_s + self._budget.gate_s)
                if late:
                    self.say(f"weights {version}: {late} rollouts are still being collected and miss its sweep")
                await self._carry_out(version, update)
                self.finished.write()

    async def settle_the_last(self) -> None:
        """Score what waits for the final weights, after the last session."""
        request = await self._sweep_request()
        if request is not None and self._can_score:
            await sweep_samples([self.services.engine], self.finished.samples, request)
        self.finished.write()

    async def _sweep_sessions(self, server: SessionServerClient) -> None:
        request = await self._sweep_request()
        with suppress(SessionServerError, TimeoutError):  # the update sweeps again and reports problems
            if request is not None:
                async with asyncio.timeout(request.budget_s + self._budget.gate_s):
                    await server.sweep(request)

    async def _sweep_request(self) -> SweepRequest | None:
        try:
            await self.services.engine.read_version()
        except EngineError:  # the update meets the same error and reports it
            return None
        version = known_version(self.services.engine.weight_version)
        if version is None:
            return None
        return SweepRequest(version, self._budget.sweep_s, self._budget.sweep_concurrency)

    async def _carry_out(self, version: int, update: PlannedUpdate) -> None:
        at_s = time.monotonic() - self._began
        async with self._updater.update(version) as running:
            await running.apply((self.directory.checkpoints / str(version)).resolve())
        report = running.report
        settled = int(report.telemetry()["weights/proximal_tokens_settled"])
        problems = f"; {'; '.join(report.problems)}" if report.problems else ""
        self.say(
            f"weights {report.version} ({update.when}): agents waited {report.pause_s:.2f} s,"
            f" the sweep scored {settled} tokens{problems}"
        )
        self._reports.append(
            {
                "version": version,
                "when": update.when,
                "at_s": at_s,
                "mode": str(report.mode),
                "pause_s": report.pause_s,
                "seconds": {str(step): seconds for step, seconds in report.seconds.items()},
                "workers": [asdict(worker) for worker in report.workers],
                "sweeps": [msgspec.structs.asdict(server.sweep) for server in report.servers if server.sweep],
                "problems": list(report.problems),
            }
        )
        self.directory.write_json(self.directory.weights, {"updates": self._reports})
