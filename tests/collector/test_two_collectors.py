"""Two collectors on one server: one ends its over-sampled groups again and again, and the other does not notice."""

import asyncio
from collections import Counter
from pathlib import Path

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import OutcomeKind
from harness.training.collector.collector import Collector
from harness.training.collector.groups import RolloutIndex
from harness.training.collector.step_outcome import Disposition
from harness.training.collector.step_rules import Partial, StepBudget, StepRules
from harness.types import SampleStatus
from tests.builders import toy_template
from tests.collector.training import DEADLINES, Field, playing

SLOW = ScriptStep(text="A slow answer.", token_delay_s=0.02)


class Counting(ScriptedEngine):
    """Counts how often it is told to end everything."""

    aborts_of_all = 0

    async def abort(self, request_id: str | None) -> int:
        """As ever."""
        self.aborts_of_all += request_id is None
        return await super().abort(request_id)


async def test_one_ends_its_groups_and_32_sessions_of_the_other_go_on(tmp_path: Path):
    """No turn of theirs is refused or cut, and the engine is never told to end everything."""
    engine = Counting(toy_template().tokenizer, Script((SLOW,)))
    async with (
        playing(tmp_path, engine=engine) as field,
        SessionManager(field.server.url, engines=[engine], deadlines=DEADLINES, grace_s=0.5) as other,
    ):
        field.turns = lambda _: 6
        quiet = Collector(field.source("quiet"), StepRules(StepBudget(32, 4), concurrency=32))
        greedy = Collector(field.source("greedy", other), StepRules(StepBudget(4, 2), concurrency=12, over_sampling=2))
        async with quiet, greedy:
            collection = quiet.begin(0)
            ended = []
            while not collection.is_over:
                step = await greedy.begin(len(ended)).finished()
                ended.append(len(step.ended_groups))
            whole = await collection.finished()
            groups = [group async for group in collection.groups()]
        aborts = engine.aborts_of_all
        assert field.sessions() == 0

    assert sum(ended) >= 1
    assert aborts == 0
    assert Counter(each.use for each in whole.rollouts) == {Disposition.DELIVERED: 32}
    rollouts = [scored.rollout for group in groups for scored in group.rollouts]
    assert {rollout.outcome.kind for rollout in rollouts} == {OutcomeKind.FINISHED}
    assert {tuple(rollout.session["refusals"]) for rollout in rollouts} == {()}
    assert {turn["status"] for rollout in rollouts for turn in rollout.session["turns"]} == {"completed"}
    assert {sample.status for rollout in rollouts for sample in rollout.samples} == {SampleStatus.COMPLETED}


async def resume_twice(field: Field) -> None:
    """Three steps, of which each begins with what the one before has left."""
    rules = StepRules(StepBudget(2, 2), concurrency=6, over_sampling=2, partial=Partial.RESUME)
    async with Collector(field.source(), rules) as collector:
        steps = []
        for number in range(3):
            collection = collector.begin(number, is_last=number == 2)
            groups = [group async for group in collection.groups()]
            steps.append((await collection.finished(), groups))
            kept = [scored for carried in steps[-1][0].carried for scored in carried.cut_short.values()]
            assert field.sessions() == len(kept)
    assert field.sessions() == 0
    resumed = Counter[RolloutIndex]()
    for _, groups in steps[1:]:
        for group in groups:
            for scored in group.rollouts:
                turns = scored.rollout.session["turns"]
                resumed[scored.index] += any(turn["notes"].get("attempts", 1) > 1 for turn in turns)
                assert [turn["status"] for turn in turns] == ["completed"] * field.turns(scored.index)
                assert scored.rollout.session["ledger"]["generated"] == scored.rollout.session["ledger"]["trained"]
    assert resumed.total() > 0, "no turn was cut short and gone on with"


async def test_groups_that_are_ended_go_on_in_the_next_step(tmp_path: Path):
    """From their sessions: no token is sampled twice, and none is lost."""
    async with playing(tmp_path, SLOW) as field:
        field.turns = lambda index: 1 + 3 * index.group.number if index.group.step == 0 else 12
        await asyncio.wait_for(resume_twice(field), 120)


async def test_only_who_is_scored_loses_a_reward(tmp_path: Path):
    """A rollout that is being scored when its step is over is not waited for; nor is one that waits for a session."""
    scoring = asyncio.Event()

    async with playing(tmp_path) as field:
        source = field.source()

        async def never(index: RolloutIndex, rollout: object) -> float:
            if index.group.number == 0:
                return 1.0
            scoring.set()
            await asyncio.sleep(3600)
            return 0.0

        source._reward = never
        async with Collector(source, StepRules(StepBudget(1), concurrency=2, over_sampling=1)) as collector:
            step = await collector.begin(0).finished()
        assert field.sessions() == 0
    assert Counter(each.use for each in step.rollouts) == {Disposition.DELIVERED: 1, Disposition.OVER_SAMPLED: 1}
