"""The rollouts of one scenario, a bounded number at a time: run, score, record.

However a rollout goes, it becomes one record, durable before the next one of its worker begins. Order and number of
workers change when a rollout runs, never what it is (I10).
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from harness.errors import StoreFull
from harness.rollouts.agents.task import AgentTask, ProgramAgent
from harness.rollouts.manager import SessionManager
from harness.samples.codec import sample_to_json
from harness.samples.rollout import Rollout
from harness.suite.faults.injector import FaultInjector
from harness.suite.judge.reward import Score, score_session
from harness.suite.record.rollout_table import RolloutLog, RolloutRecord, SessionFacts
from harness.suite.record.rundir import RunDirectory
from harness.suite.record.storage import disk_full
from harness.suite.run.interrupts import Interrupts
from harness.suite.run.progress import Progress
from harness.suite.run.services import Services
from harness.suite.scenarios.folder import ScenarioFolder
from harness.suite.scenarios.plan import PlannedRollout


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """What the rollouts of a scenario share."""

    manager: SessionManager
    services: Services
    agent: ProgramAgent
    directory: RunDirectory
    log: RolloutLog
    progress: Progress
    interrupts: Interrupts
    faults: FaultInjector | None = None
    """Injects the scenario's faults; None when it has none."""

    async def run(self, rollouts: Sequence[PlannedRollout], *, width: int) -> None:
        """Run `rollouts` in order, `width` at a time, until done or interrupted.

        Raises `StoreError` when a record cannot be made durable; the other rollouts are then cancelled.
        """
        waiting = iter(rollouts)
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(width, len(rollouts))):
                workers.create_task(self._work(waiting))

    async def _work(self, waiting: Iterator[PlannedRollout]) -> None:
        for planned in waiting:
            if self.interrupts.is_requested:
                return
            await self._run(planned)

    async def _run(self, planned: PlannedRollout) -> None:
        self.progress.started(planned)
        rollout = await self._rollout(planned)
        if rollout is None:
            return
        record = record_of(planned, rollout, await self._score(planned, rollout))
        record = msgspec.structs.replace(record, met_fault=self._has_met_fault(planned))
        self.log.append(record)
        self._require_space(rollout)
        self.progress.ended(record)

    async def _rollout(self, planned: PlannedRollout) -> Rollout | None:
        task = self._task(planned)
        return await (self.manager.run(task) if self.faults is None else self.faults.run(task, planned.number))

    def _has_met_fault(self, planned: PlannedRollout) -> bool:
        """Whether a fault, and nobody at the terminal, may be why the rollout ended as it did."""
        return self.faults is not None and self.faults.has_met(planned.number) and not self.interrupts.is_requested

    def _task(self, planned: PlannedRollout) -> AgentTask:
        spec = planned.folder.scenario.agent
        return AgentTask(
            agent=self.agent,
            prompt=planned.folder.text_of(planned.prompt),
            workdir=self.directory.workdir(planned.number),
            model=self.services.model,
            deadline_s=spec.deadline_s,
            session=planned.session,
            request_kwargs=spec.request_kwargs,
            metadata=planned.prompt.metadata,
        )

    async def _score(self, planned: PlannedRollout, rollout: Rollout) -> Score:
        check = planned.folder.check
        if check is None:
            return Score()
        return await score_session(
            check,
            rollout.session,
            rollout.agent_result,
            planned.prompt.metadata | planned.prompt.check_metadata,
            deadline_s=planned.folder.scenario.checks.check_deadline_s,
        )

    def _require_space(self, rollout: Rollout) -> None:
        """Raises `StoreFull` when the session server ran out of space: every further rollout would, too."""
        if rollout.session["refusals"].get(StoreFull.code):
            raise disk_full(self.directory.database)


def with_environment(agent: ProgramAgent, folder: ScenarioFolder) -> ProgramAgent:
    """`agent` with the environment that the scenario gives it."""
    spec = folder.scenario.agent
    game = {"HARNESS_GAME": str(folder.file(spec.game))} if spec.game else {}
    return replace(agent, env={**agent.env, **game, **spec.env})


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
        session=SessionFacts.of(rollout.session),
        samples=[sample_to_json(sample) for sample in rollout.samples],
        seconds=rollout.seconds,
    )
