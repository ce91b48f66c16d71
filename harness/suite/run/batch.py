"""The rollouts of one scenario, a bounded number at a time: run, score, record.

However a rollout goes, it becomes one record, durable before the next one of its worker begins. Order and number of
workers change when a rollout runs, never what it is (I10).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from harness.errors import Cause, EngineUnavailable, HarnessError, ScenarioError, StoreFull
from harness.machine.disk import disk_full
from harness.rollouts.agents.task import Agent, AgentTask
from harness.rollouts.manager import SessionManager
from harness.samples.codec import sample_to_json
from harness.samples.rollout import ENDED_WELL, Outcome, OutcomeKind, Rollout
from harness.samples.turn_rewards import reward_turns
from harness.suite.faults.injector import FaultInjector
from harness.suite.judge.reward import Score, score_session
from harness.suite.record.rollout_table import RecordedSession, RolloutLog, RolloutRecord
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.finished import FinishedSamples
from harness.suite.run.interrupts import Interrupts
from harness.suite.run.services import Services
from harness.suite.run.watch import LiveSession
from harness.suite.scenarios.plan import PlannedRollout


class Progress(Protocol):
    """Says what a run is doing; drawing it is the caller's business.

    Called from the run's event loop; must return quickly and must not raise.
    """

    def say(self, text: str) -> None:
        """Something the user wants to know, in one line."""

    def begin(self, total: int, done: int) -> None:
        """The run has `total` rollouts, of which `done` are not run again."""

    def begin_rollout(self, rollout: PlannedRollout) -> None:
        """A rollout has begun."""

    def look(self, sessions: Sequence[LiveSession]) -> None:
        """How sessions that run stand now, about every second; the longest running ones where they are many."""

    def end_rollout(self, record: RolloutRecord) -> None:
        """A rollout has ended and its record is durable."""


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The rollouts of a scenario, and everything that they share."""

    manager: SessionManager
    services: Services
    agent: Agent
    directory: RunDirectory
    log: RolloutLog
    progress: Progress
    interrupts: Interrupts
    faults: FaultInjector | None = None
    """Injects the scenario's faults; None when it has none."""
    finished: FinishedSamples | None = None
    """Has the samples while weights change; None when they do not."""

    async def run(self, rollouts: Sequence[PlannedRollout], *, width: int) -> None:
        """Run `rollouts` in order, `width` at a time, until done or interrupted.

        Raises `StoreError` when a record cannot be made durable; the other rollouts are then cancelled.
        """
        waiting = iter(rollouts)

        async def work() -> None:
            for planned in waiting:
                if self.interrupts.is_requested:
                    return
                await self._run(planned)

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(width, len(rollouts))):
                workers.create_task(work())

    async def _run(self, planned: PlannedRollout) -> None:
        self.progress.begin_rollout(planned)
        await asyncio.to_thread(self.directory.clear_workdir, planned.number)
        spec = planned.folder.scenario.agent
        task = AgentTask(
            agent=self.agent,
            prompt=planned.folder.text_of(planned.prompt),
            workdir=self.directory.workdir(planned.number),
            model=self.services.model,
            deadline_s=spec.deadline_s,
            session=planned.session,
            request_kwargs=spec.request_kwargs,
            metadata=planned.prompt.metadata,
        )
        start = await self.services.start_of_server()
        rollout = await (self.manager.run(task) if self.faults is None else self.faults.run(task, planned.number))
        if rollout is None:  # a fault ended all rollouts and had to cancel this one
            return
        if self.finished is not None:
            self.finished.add(planned.number, rollout.samples)
        rollout, problem = await self._doubt(rollout, start)
        score, check = Score(), planned.folder.check
        if check is not None:
            metadata = planned.prompt.metadata | planned.prompt.check_metadata
            deadline_s = planned.folder.scenario.checks.check_deadline_s
            score = await score_session(check, rollout.session, rollout.agent_result, metadata, deadline_s=deadline_s)
        if self.finished is not None:  # swept meanwhile
            rollout = replace(rollout, samples=self.finished.record(planned.number))
        try:
            samples = reward_turns(rollout.samples, rollout.session, score.turn_rewards, score.reward)
            rollout = replace(rollout, samples=samples)
        except ScenarioError as error:
            score = Score(error=f"{check.name if check else ''}: {error.message}")
        record = record_of(planned, rollout, score)
        if self.faults is not None and self.faults.has_met(planned.number) and not self.interrupts.is_requested:
            record = msgspec.structs.replace(record, met_fault=True)  # not the user but the fault may have ended it
        self.log.append(record)
        if rollout.session["refusals"].get(StoreFull.code):  # every further rollout would be refused, too
            raise disk_full(self.directory.database)
        self.progress.end_rollout(record)
        if problem is not None:
            raise problem

    async def _doubt(self, rollout: Rollout, start: str) -> tuple[Rollout, HarnessError | None]:
        """`rollout`, blamed on its server when that was restarted or went away since `start` and it did not end well.

        Also when it ended well, but the server serves something else by now: its later turns may be of that. With the
        error that ends the run when the server is gone.
        """
        problem: HarnessError | None = None
        detail, is_disturbed, may_be_mixed = "the session server was started anew meanwhile", False, False
        try:
            is_disturbed = await self.services.start_of_server() != start
        except EngineUnavailable as error:
            problem, detail, may_be_mixed = error, error.message, True
        except HarnessError as error:
            problem, detail, is_disturbed = error, "the session server went away meanwhile", True
        if not may_be_mixed and (not is_disturbed or rollout.outcome.kind in ENDED_WELL):
            return rollout, problem
        detail = f"{detail}; {rollout.outcome.detail}"
        return replace(rollout, outcome=Outcome(OutcomeKind.HARNESS_FAILED, Cause.HARNESS, detail)), problem


def record_of(planned: PlannedRollout, rollout: Rollout, score: Score) -> RolloutRecord:
    """Everything worth keeping of a rollout that has ended."""
    return RolloutRecord(
        number=planned.number,
        group=planned.group,
        scenario=planned.folder.name,
        seed=planned.seed,
        session_id=rollout.session_id,
        outcome=rollout.outcome.kind,
        cause=rollout.outcome.cause,
        detail=rollout.outcome.detail,
        agent_result=rollout.agent_result,
        reward=score.reward,
        score=score.details,
        score_error=score.error,
        session=RecordedSession.of(rollout.session),
        samples=[sample_to_json(sample) for sample in rollout.samples],
        seconds=rollout.seconds,
    )
