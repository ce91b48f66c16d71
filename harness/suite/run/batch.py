"""Run, score and record one scenario's rollouts, some at a time. Order never changes a result (I10)."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol
from uuid import uuid4

import msgspec

from harness.errors import Cause, EngineUnavailable, HarnessError, SandboxFailed, ScenarioError, StoreFull
from harness.machine.disk import disk_full, make_way
from harness.rollouts.agents.task import Agent, AgentTask
from harness.rollouts.client.session_server import SessionSummary
from harness.rollouts.manager import SessionManager, rollout_without_session
from harness.samples.codec import sample_to_json
from harness.samples.rollout import ENDED_WELL, Outcome, OutcomeKind, Rollout
from harness.samples.turn_rewards import reward_turns
from harness.sessions.session_config import Inheritance
from harness.suite.faults.injector import FaultInjector
from harness.suite.judge.reward import Score, score_session
from harness.suite.judge.trial import TaskImages, Trial
from harness.suite.record.rollout_table import RecordedSession, RolloutLog, RolloutRecord
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.audited import RunAudit
from harness.suite.run.interrupts import Interrupts
from harness.suite.run.services import OwnServices, Services
from harness.suite.run.weight_schedule import FinishedSamples
from harness.suite.scenarios.plan import PlannedRollout, ScenarioPlan
from harness.suite.scenarios.scenario import Prompt


class Progress(Protocol):
    """Receiver of a run's progress. Methods run in the event loop; they must return quickly and must not raise."""

    def say(self, text: str) -> None:
        """Show one line to the user."""

    def begin(self, total: int, done: int) -> None:
        """Begin a run of `total` rollouts, `done` of which do not run."""

    def begin_rollout(self, rollout: PlannedRollout) -> None:
        """Begin a rollout."""

    def look(self, sessions: Mapping[str, SessionSummary]) -> None:
        """Show running sessions, about once a second; the oldest if there are many."""

    def end_rollout(self, record: RolloutRecord) -> None:
        """End a rollout, whose record is durable."""


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Rollouts of a scenario and what they share."""

    manager: SessionManager
    services: Services
    agent: Agent
    directory: RunDirectory
    log: RolloutLog
    progress: Progress
    interrupts: Interrupts
    faults: FaultInjector | None = None
    finished: FinishedSamples | None = None
    """Queue of finished samples; None without weight updates."""
    audit: RunAudit | None = None
    images: TaskImages = field(default_factory=TaskImages)
    goes_on: bool = False
    """True if final rollouts, too, begin with their records."""

    async def run(self, rollouts: ScenarioPlan, *, width: int) -> None:
        """Run `rollouts` in order, `width` at a time, until interrupted. Raises `StoreError`, cancelling the others."""
        # One iterator for all workers keeps the order.
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
        prompt = await asyncio.to_thread(planned.read_prompt)
        await asyncio.to_thread(make_way, self.directory.workdir(planned.number))
        trial = self._trial(planned, prompt)
        task = planned.task(self.agent, prompt, self.directory.workdir(planned.number), self.services.model)
        start = await self.services.start_of_server()
        rollout = await self._play(task, trial, planned.number)
        if rollout is None:  # a fault ended all rollouts and had to cancel this one
            return
        if self.finished is not None:
            self.finished.add(planned.number, rollout.samples)
        rollout, problem = await self._doubt(rollout, start)
        score = await self._score(planned, prompt, rollout, trial)
        if self.finished is not None:  # an update may have scored more tokens during the check
            rollout = replace(rollout, samples=self.finished.record(planned.number))
        try:
            samples = reward_turns(rollout.samples, rollout.session, score.turn_rewards, score.reward)
            rollout = replace(rollout, samples=samples)
        except ScenarioError as error:
            score = Score(error=f"{planned.folder.check.name if planned.folder.check else ''}: {error.message}")
        record = record_of(planned, rollout, score)
        # After a stop request, the user and not the fault may have ended the rollout.
        if self.faults is not None and self.faults.has_met(planned.number) and not self.interrupts.is_requested:
            record = msgspec.structs.replace(record, met_fault=True)
        self.log.append(record)
        if rollout.session["refusals"].get(StoreFull.code):  # the server would refuse every further rollout
            raise disk_full(self.directory.database)
        self.progress.end_rollout(record)
        if self.audit is not None and isinstance(self.services, OwnServices):
            self.audit.add(record.scenario, record.seed, record.session_id, self.services.engine)
        if trial is not None:
            await asyncio.to_thread(trial.write_result, record)
        if problem is not None:
            raise problem

    def _with_record(self, task: AgentTask, number: int) -> AgentTask:
        # A lost rollout continues from its record.
        earlier = self.log.find_record(number, even_final=self.goes_on)
        task = replace(task, inherits=None if earlier is None else Inheritance(earlier))
        if not isinstance(self.services, OwnServices):  # another operator's server: its client notes its sessions
            return task
        session_id = uuid4().hex
        self.log.begin(number, session_id)
        return replace(task, session={**task.session, "session_id": session_id})

    async def _score(self, planned: PlannedRollout, prompt: Prompt, rollout: Rollout, trial: Trial | None) -> Score:
        check = planned.folder.check
        if trial is not None:
            return trial.score(rollout.outcome.kind)
        if check is None or rollout.outcome.kind is OutcomeKind.SANDBOX_FAILED:
            return Score()
        metadata = prompt.metadata | prompt.check_metadata
        deadline_s = planned.folder.scenario.checks.check_deadline_s
        return await score_session(check, rollout.session, rollout.agent_result, metadata, deadline_s=deadline_s)

    async def _play(self, task: AgentTask, trial: Trial | None, number: int) -> Rollout | None:
        task = self._with_record(task, number)
        try:
            task = task if trial is None else await trial.around(task)
        except SandboxFailed as error:
            return rollout_without_session(
                task, Outcome(OutcomeKind.SANDBOX_FAILED, Cause.HARNESS, error.message), seconds=0.0
            )
        rollout = await self._run_agent(task, number)
        if task.inherits is None or rollout is None or rollout.outcome.kind is not OutcomeKind.NOT_STARTED:
            return rollout
        self.progress.say(f"rollout {number} starts over: {rollout.outcome.detail}")
        return await self._run_agent(replace(task, inherits=None), number)

    async def _run_agent(self, task: AgentTask, number: int) -> Rollout | None:
        return await (self.manager.run(task) if self.faults is None else self.faults.run(task, number))

    def _trial(self, planned: PlannedRollout, prompt: Prompt) -> Trial | None:
        task, agent = planned.folder.prompts.task_of(prompt), planned.folder.scenario.agent
        if task is None:
            return None
        return Trial(task, self.directory.trial(planned.number), agent.sandbox, agent.name, self.images)

    async def _doubt(self, rollout: Rollout, start: str) -> tuple[Rollout, HarnessError | None]:
        """Blame the server, so that the rollout runs again on resume.

        Applies if the server restarted or vanished and the rollout did not end well, or if the server now serves
        something else. The returned error ends the run.
        """
        problem: HarnessError | None = None
        detail, is_disturbed, may_be_mixed = "the session server was restarted meanwhile", False, False
        try:
            is_disturbed = await self.services.start_of_server() != start
        except EngineUnavailable as error:
            problem, detail, may_be_mixed = error, error.message, True
        except HarnessError as error:
            problem, detail, is_disturbed = error, "the session server disappeared meanwhile", True
        # Even a good end may hide turns of another model.
        if not may_be_mixed and (not is_disturbed or rollout.outcome.kind in ENDED_WELL):
            return rollout, problem
        detail = f"{detail}; {rollout.outcome.detail}"
        return replace(rollout, outcome=Outcome(OutcomeKind.HARNESS_FAILED, Cause.HARNESS, detail)), problem


def record_of(planned: PlannedRollout, rollout: Rollout, score: Score) -> RolloutRecord:
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
        figures=score.figures,
        reason=score.reason,
        session=RecordedSession.of(rollout.session),
        samples=[sample_to_json(sample) for sample in rollout.samples],
        seconds=rollout.seconds,
    )
