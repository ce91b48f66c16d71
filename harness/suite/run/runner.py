"""Run a suite from its plan to its report.

    for every engine that scenarios need: serve it, run each scenario's rollouts on it
    then: export the samples, check the ledger, write the report

An error or the user may end a run early; records are durable, and the next run continues from them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from harness.errors import SessionServerError
from harness.machine.deadlines import beside
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import Deadlines, SessionServerClient, SessionSummary
from harness.rollouts.manager import SessionManager
from harness.suite.faults.actions import Roster
from harness.suite.faults.firing import FaultLog, report_faults
from harness.suite.faults.injector import FaultInjector
from harness.suite.judge.accounting import account_run
from harness.suite.judge.witness import Witness
from harness.suite.record.config import SuiteSelection
from harness.suite.record.rollout_table import ExportedSamples, RolloutLog, RolloutRecord, find_superseded, reading_run
from harness.suite.record.rundir import RunDirectory, check_same_engine, note_engine, note_start, read_lock
from harness.suite.run.attached import AttachedChoice, attach
from harness.suite.run.audited import RunAudit, auditing, read_audit
from harness.suite.run.batch import Progress, RolloutBatch
from harness.suite.run.interrupts import Interrupts, one_error
from harness.suite.run.report import RunReport, ScenarioReport, status_of
from harness.suite.run.services import EngineChoice, OwnServices, Services, serve_engine
from harness.suite.run.token_readings import read_engine_counts, read_token_readings
from harness.suite.run.weight_schedule import FinishedSamples, change_weights
from harness.suite.scenarios.folder import ScenarioFolder
from harness.suite.scenarios.plan import ScenarioPlan, open_agent, plan_rollouts


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """A run in its directory. Executing it again continues it."""

    selection: SuiteSelection
    directory: RunDirectory
    progress: Progress
    interrupts: Interrupts
    concurrency: int | None = None
    """Rollouts at a time; None uses each scenario's number."""
    admin_token: str | None = None
    deadlines: Deadlines | None = None
    only: Collection[int] | None = None
    """Rollouts to play, even if final; None plays those that are not."""
    goes_on: bool = False
    """True if the rollouts in `only` begin with their records."""
    otlp_endpoint: str | None = None

    async def execute(self) -> RunReport:
        """Run the rollouts in `only`, or all not final, and report. Raises `HarnessError`, not for a user's stop."""
        began = time.monotonic()
        with self.directory.occupy(), RolloutLog(self.directory.database) as log:
            plans = plan_rollouts(self.selection.folders)
            final = {number for number, record in log.last_attempts().items() if record.is_final}
            unfinished = [plan.keep(lambda number: number not in final) for plan in plans]
            only = self.only
            pending = unfinished if only is None else [plan.keep(only.__contains__) for plan in plans]
            count = sum(map(len, pending))
            self.progress.begin(sum(map(len, plans)), sum(map(len, plans)) - count)
            if count:  # an old report would mark the run complete
                self.directory.result.unlink(missing_ok=True)
            self.directory.write_json(self.directory.lock, note_start(read_lock(self.directory.lock)))
            with one_error():
                async with auditing(
                    self.selection.folders, self.directory, self.progress.say, lambda: self.interrupts.is_requested
                ) as audit:
                    for choice, chosen in groupby(
                        filter(len, pending), key=lambda plan: self._choose_engine(plan.folder)
                    ):
                        if not self.interrupts.is_requested:
                            await self._run_on_engine(choice, list(chosen), log, audit)
                    if audit is not None:
                        await audit.finish()
            left_out = only is not None and any(number not in only for plan in unfinished for number in plan.numbers)
            was_stopped = self.interrupts.is_requested or left_out
            return self._report(log.last_attempts(), began, was_stopped=was_stopped)

    def _choose_engine(self, folder: ScenarioFolder) -> EngineChoice | AttachedChoice:
        url = self.selection.config.overrides.server
        return EngineChoice.of(folder) if url is None else AttachedChoice.of(folder, url)

    async def _run_on_engine(
        self, choice: EngineChoice | AttachedChoice, plans: list[ScenarioPlan], log: RolloutLog, audit: RunAudit | None
    ) -> None:
        database, say = self.directory.database, self.progress.say
        opening: AbstractAsyncContextManager[Services]
        if isinstance(choice, AttachedChoice):
            opening = attach(choice, self.admin_token, database, say, self.deadlines)
        else:
            opening = serve_engine(choice, database, say, otlp_endpoint=self.otlp_endpoint)
        async with AsyncExitStack() as stack:
            async with self.interrupts.until_request():  # installing and starting a server takes minutes
                services = await stack.enter_async_context(opening)
            if self.interrupts.is_requested:
                return
            lock = read_lock(self.directory.lock)
            check_same_engine(lock["digests"].setdefault(choice.key, services.identity), services.identity)
            lock = note_engine(lock, choice.key, services.engines, services.model_dir)
            self.directory.write_json(self.directory.lock, lock)
            await services.close_abandoned_sessions()
            async with read_engine_counts(choice.key, services, self.directory):
                for plan in plans:
                    if not self.interrupts.is_requested:
                        await self._run_scenario(plan, services, log, audit)
                if audit is not None and not self.interrupts.is_requested:
                    await audit.await_scores()

    async def _run_scenario(
        self, plan: ScenarioPlan, services: Services, log: RolloutLog, audit: RunAudit | None
    ) -> None:
        folder = plan.folder

        async def drain() -> None:
            self.progress.say("stopping: waiting for the agents to end; Ctrl+C again kills them")
            await services.drain()

        self.progress.say(f"{folder.name}: preparing the agent {folder.scenario.agent.name}")
        async with open_agent(folder) as agent, services.open_manager() as manager:
            faults = None
            if isinstance(services, OwnServices) and services.seams is not None:
                seeds = {position: plan.find(plan.first + position).seed for position in range(folder.session_count)}
                roster = Roster(folder.name, services.seams.server, plan.first, seeds)
                fault_log = FaultLog(self.directory.faults)
                faults = FaultInjector(folder.scenario.faults, roster, services.seams, manager, fault_log)
            weights = folder.scenario.weights
            finished = None if weights is None else FinishedSamples(manager, log)
            batch = RolloutBatch(
                *(manager, services, agent, self.directory, log, self.progress, self.interrupts, faults, finished),
                audit=audit,
                goes_on=self.goes_on,
            )
            width = self.concurrency or folder.scenario.concurrency
            async with (
                watch_sessions(manager, services.address, self.progress.look),
                change_weights(weights, services, finished, self.directory, self.progress.say),
                nullcontext() if faults is None else faults.active(),
            ):
                await self.interrupts.guard(batch.run(plan, width=width), drain=drain)

    def _report(self, records: Mapping[int, RolloutRecord], began: float, *, was_stopped: bool) -> RunReport:
        final = [record for record in records.values() if record.is_final]
        samples = ExportedSamples(final)
        ledger = account_run(self.directory.database, final, samples)
        firings = FaultLog(self.directory.faults).read()
        hearings = read_token_readings(self.directory)
        with reading_run(self.directory.database) as connection:
            replayed = {each.number for each in find_superseded(connection) if each.is_final}
        scenarios = [
            ScenarioReport.of(
                folder,
                [record for record in records.values() if record.scenario == folder.name],
                report_faults(folder.name, folder.scenario.faults, firings),
                [each for each in hearings if each.engines == self._choose_engine(folder).key],
                replayed,
            )
            for folder in self.selection.folders
        ]
        report = RunReport(
            directory=self.directory.path,
            status=status_of(scenarios, was_interrupted=was_stopped),
            scenarios=scenarios,
            ledger=ledger,
            witness=Witness.of(hearings, ledger),
            samples=len(samples),
            has_parquet=self.directory.write_samples(samples),
            seconds=time.monotonic() - began,
            audit=read_audit(self.directory),
            is_guarded=any(engine.get("repeat_guard") for engine in read_lock(self.directory.lock)["digests"].values()),
        )
        if report.is_complete:
            self.directory.write_json(self.directory.result, report.to_json())
        return report


_EVERY_S = 1.0
_MOST = 100
_ANSWER_S = 5.0


@asynccontextmanager
async def watch_sessions(
    manager: SessionManager, address: SessionServerAddress, look: Callable[[Mapping[str, SessionSummary]], None]
) -> AsyncIterator[None]:
    """Call `look` once a second with the sessions, by scenario and number. An error costs only one look."""

    async def keep_looking() -> None:
        async with SessionServerClient(address) as server:
            while True:
                await asyncio.sleep(_EVERY_S)
                # By id: a shared server has other users' sessions. `_MOST` is the limit of one request.
                names = {each: _name(task.session["metadata"]) for each, task in islice(manager.live.items(), _MOST)}
                try:
                    seen = await server.look(list(names), deadline_s=_ANSWER_S)
                except SessionServerError:
                    continue
                look({names[each.session_id]: each for each in seen if each.session_id in names})

    async with beside(keep_looking(), name="watch sessions"):
        yield


def _name(metadata: Any) -> str:
    return f"{metadata['scenario']}/{metadata['rollout']}"
