"""Build rollout source, rules, segment maker and pipeline from `[train]`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from harness.errors import ScenarioError, StoreFull
from harness.machine.disk import disk_full, make_way
from harness.rollouts.agents.function import load_named
from harness.rollouts.control.abort_report import Keep
from harness.samples.credit import return_to_go_advantages, rollout_advantages, turn_advantages
from harness.samples.encoders import SegmentEncoder, WholeSampleEncoder
from harness.samples.segments import TooLong
from harness.suite.judge.reward import StandingCheck
from harness.suite.run.audited import RunAudit
from harness.suite.run.services import OwnServices
from harness.suite.scenarios.folder import ScenarioFolder
from harness.suite.scenarios.plan import open_agent
from harness.suite.scenarios.scenario import Scenario
from harness.suite.scenarios.train_spec import TrainSpec
from harness.suite.training.journal import TrainingJournal
from harness.suite.training.scenario_tasks import ScenarioTasks, Workdirs
from harness.training.collector.groups import (
    CreditRule,
    RolloutIndex,
    ScoredRollout,
    drop_zero_variance,
    standardize,
    take_rewards,
)
from harness.training.collector.pipeline import Normalizer, StepPipeline
from harness.training.collector.record.step_table import StepTable
from harness.training.collector.rollout_source import RolloutSource, SessionSource
from harness.training.collector.sampling_scale import OffScale
from harness.training.collector.segment_maker import SegmentMaker, Stale
from harness.training.collector.step_rules import OnFailure, Order, Partial, StepBudget, StepRules
from harness.training.learner.learner import Learner


@dataclass(frozen=True, slots=True)
class KeptRollouts:
    """Source that stores what `source` scored before its step has it, so that a killed run does not replay it."""

    source: RolloutSource
    table: StepTable
    database: Path
    workdirs: Workdirs
    note_end: Callable[[RolloutIndex, str | None], None] = lambda *_: None
    """Takes the session of each rollout with a reward, once it is stored."""
    _sought: set[RolloutIndex] = field(default_factory=set, init=False)  # not yet passed to the source

    async def run(self, index: RolloutIndex, resumes: str | None = None) -> ScoredRollout:
        """See `RolloutSource`. Raises `StoreFull` for a turn, `StoreError` for a rollout that could not be stored."""
        if resumes is None and (kept := await self._find(index)) is not None:
            return kept
        scored = await self.source.run(index, resumes)
        if scored.rollout.session["refusals"].get(StoreFull.code):  # the server would refuse every further rollout
            raise disk_full(self.database)
        if scored.reward is not None:
            await asyncio.to_thread(self.table.keep, scored)
            self.note_end(index, scored.rollout.session_id)
        return scored

    async def end(self, running: Mapping[RolloutIndex, asyncio.Task[ScoredRollout]], keep: Keep) -> None:
        for index in running.keys() & self._sought:
            running[index].cancel()  # it has no session
        await self.source.end(running, keep)

    async def give_back(self, session_id: str) -> None:
        await self.source.give_back(session_id)

    async def _find(self, index: RolloutIndex) -> ScoredRollout | None:
        self._sought.add(index)
        try:
            kept = await asyncio.to_thread(self.table.recall, index)
            if kept is None:
                await asyncio.to_thread(make_way, self.workdirs.of(index))  # a killed process may have left it
            return kept
        finally:
            self._sought.remove(index)


def rules_of(scenario: Scenario, train: TrainSpec) -> StepRules:
    return StepRules(
        StepBudget(train.budget, scenario.samples_per_prompt),
        concurrency=train.decode_micro_batch or scenario.concurrency,
        over_sampling=train.over_sampling,
        partial=Partial(train.partial),
        group_filter=drop_zero_variance if train.group_filter == "zero_variance" else None,
        most_dropped=train.most_dropped,
        attempts=train.attempts,
        on_failure=OnFailure(train.on_failure),
        order=Order(train.order),
        deadline_s=train.rollout_deadline_s,
        off_scale=OffScale(train.off_scale),
    )


def credit_of(train: TrainSpec) -> CreditRule | None:
    """Return the estimator that credits turns; None for one advantage per rollout."""
    rules: dict[str, CreditRule] = {
        "rollout": rollout_advantages,
        "turn": turn_advantages,
        "return_to_go": partial(return_to_go_advantages, discount=train.discount),
    }
    return rules.get(train.advantage)


def encoder_of(folder: ScenarioFolder, train: TrainSpec) -> SegmentEncoder:
    """Return the scenario's encoder or the default. Raises `ScenarioError`."""
    if train.encoder is None:
        return WholeSampleEncoder()
    file, _, name = train.encoder.partition(":")
    made = load_named(folder.file(file), name)()
    if not callable(getattr(made, "encode", None)):
        raise ScenarioError(f"train.encoder: expected {train.encoder} to make a SegmentEncoder, got {made!r}")
    encoder: SegmentEncoder = made
    return encoder


@asynccontextmanager
async def open_pipeline(
    folder: ScenarioFolder,
    train: TrainSpec,
    services: OwnServices,
    learner: Learner,
    *,
    table: StepTable,
    journal: TrainingJournal,
    last_step: int,
    audit: RunAudit | None = None,
) -> AsyncIterator[tuple[StepPipeline, ScenarioTasks]]:
    """Yield the pipeline and its tasks, up to `last_step`. Raises `AgentError` or `ScenarioError` for the agent."""
    scenario, check = folder.scenario, folder.check
    assert check is not None, "a scenario with [train] has a check"
    async with AsyncExitStack() as stack:
        agent = await stack.enter_async_context(open_agent(folder))
        standing = StandingCheck(check, deadline_s=scenario.checks.check_deadline_s)
        await stack.enter_async_context(standing)
        manager = await stack.enter_async_context(services.open_manager())
        rules = rules_of(scenario, train)
        workdirs = Workdirs(journal.directory.sessions)
        groups = rules.budget.groups
        tasks = ScenarioTasks(
            *(folder, agent, standing, services.model, scenario.seed, groups, workdirs, manager, train.value_forks)
        )

        def note_end(index: RolloutIndex, session_id: str | None) -> None:
            if audit is not None:
                audit.add(folder.name, index.seed(scenario.seed), session_id, services.engine)

        source = SessionSource(manager, tasks.task_of, tasks.valued_reward, training_seed=scenario.seed)
        pipeline = StepPipeline(
            KeptRollouts(source, table, journal.directory.database, workdirs, note_end),
            rules,
            learner,
            SegmentMaker(
                train.packing.length,
                encoder=encoder_of(folder, train),
                too_long=TooLong(train.packing.too_long),
                max_staleness=train.max_staleness,
                staleness=Stale(train.staleness),
                teachers=train.teachers,
            ),
            lookahead=train.packing.lookahead,
            position_rows=train.position_rows,
            advantages=take_rewards if train.advantage == "reward" else standardize,
            credit=credit_of(train),
            by_value=train.advantage == "value",
            normalizer=Normalizer(train.loss.normalizer),
            journal=journal,
            last_step=last_step,
        )
        yield await stack.enter_async_context(pipeline), tasks
