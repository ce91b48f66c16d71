"""Collectors: whatever ends in whatever order, a step has exactly its rollouts or says why not, and nothing is left."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import SegmentError, StepError
from harness.samples.rollout import OutcomeKind, Rollout
from harness.training.collector import rollout_source
from harness.training.collector.collector import Collector
from harness.training.collector.groups import GroupIndex, RolloutIndex, ScoredRollout, drop_zero_variance
from harness.training.collector.step_outcome import CollectedStep, Disposition
from harness.training.collector.step_rules import OnFailure, Order, Partial, StepBudget, StepRules
from tests.collector.staged_source import Part, StagedSource
from tests.thoroughness import examples

RULES = st.builds(
    StepRules,
    budget=st.builds(lambda groups, size: StepBudget(groups * size, size), st.integers(1, 3), st.integers(1, 3)),
    concurrency=st.integers(1, 8),
    over_sampling=st.integers(1, 2),
    partial=st.sampled_from(Partial),
    group_filter=st.sampled_from([None, drop_zero_variance]),
    most_dropped=st.just(6),
    on_failure=st.sampled_from(OnFailure),
    order=st.sampled_from(Order),
    deadline_s=st.just(0.05),
)


def parts_by(seed: int) -> Callable[[RolloutIndex], Part]:
    """Rollouts of every kind: which one a rollout is depends on the seed and its index."""

    def part_of(index: RolloutIndex) -> Part:
        draw = Random(index.seed(seed))
        return Part(
            rounds=(draw.randint(0, 3), draw.randint(1, 6), draw.randint(0, 3)),
            kind=draw.choice(
                [*[OutcomeKind.FINISHED] * 6, OutcomeKind.LIMITED, OutcomeKind.CRASHED, OutcomeKind.DRAINED]
            ),
            reward=draw.choice([0.0, 0.5, 0.75, 1.0, 1.0, 1.0, None, float("nan")]),
            is_deaf=draw.random() < 0.03,
            cut_as=draw.choice([OutcomeKind.DRAINED, OutcomeKind.DRAINED, OutcomeKind.TIMED_OUT]),
        )

    return part_of


def tokens_of(step: CollectedStep) -> int:
    """Of the rollouts that came to their end in it."""
    return sum(each.ledger["generated"] for each in step.rollouts if each.use is not Disposition.CARRIED)


@settings(deadline=None, max_examples=examples(75))
@given(seed=st.integers(0, 10_000), rules=RULES)
async def test_three_steps_in_any_order_of_events(seed: int, rules: StepRules):
    """Each has its groups whole, every rollout is accounted for once; at the end nothing runs and nothing is kept."""
    source = StagedSource(parts_by(seed))
    accounted, seen = 0, Counter[RolloutIndex]()
    failed = False
    async with Collector(source, rules) as collector:
        for number in range(3):
            collection = collector.begin(number, is_last=number == 2)
            try:
                groups = [group async for group in collection.groups()]
                step = await collection.finished()
            except StepError:
                failed = True
                assert not source.running
                assert not source.sessions
                break
            assert not source.running
            assert set(source.sessions) == {
                scored.rollout.session_id for carried in step.carried for scored in carried.cut_short.values()
            }
            assert [group.index for group in groups] == list(step.groups)
            assert len(groups) == rules.budget.groups
            assert {len(group.rollouts) + group.counted for group in groups} == {rules.budget.group_size}
            if rules.order is Order.INDEX and number == 0:
                assert list(step.groups) == sorted(step.groups)
            uses = Counter(each.use for each in step.rollouts)
            assert uses[Disposition.DELIVERED] + uses[Disposition.COUNTED] == rules.budget.rollouts_per_step
            assert uses[Disposition.DELIVERED] == sum(len(group.rollouts) for group in groups)
            delivered = {scored.index for group in groups for scored in group.rollouts}
            assert delivered == {each.index for each in step.rollouts if each.use is Disposition.DELIVERED}
            assert sum(step.dropped.values()) * rules.budget.group_size == uses[Disposition.FILTERED]
            seen.update(each.index for each in step.rollouts if each.use is not Disposition.CARRIED)
            accounted += tokens_of(step)
    assert not source.sessions
    assert source.most_running <= rules.concurrency
    assert set(seen.values()) <= {1}
    if not failed:
        assert set(seen) == set(source.began)
        assert accounted + source.lost == source.sampled


async def collect(source: StagedSource, rules: StepRules, **how: Any) -> CollectedStep:
    """One step."""
    async with Collector(source, rules, **how) as collector:
        collection = collector.begin(0, is_last=True)
        async for _ in collection.groups():
            pass
        return await collection.finished()


RULES_2X2 = StepRules(StepBudget(4, 2), concurrency=4)
SLOW = Part(rounds=(0, 60, 0))
RESUMES = StepRules(StepBudget(1), concurrency=2, over_sampling=1, partial=Partial.RESUME)


def slow_but_first(slow: Part = SLOW) -> Callable[[RolloutIndex], Part]:
    """The first group of a step is soon over, and the others are played slowly."""
    return lambda index: slow if index.group.number else Part(rounds=(0, 5, 0))


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), 1e39])
async def test_a_reward_that_is_missing_is_never_a_zero(reward: float | None):
    """The rollout is replaced, and the step fails when that happens at every attempt."""
    with pytest.raises(StepError, match=re.escape(f"its reward is {reward} x3")):
        await collect(StagedSource(lambda _: Part(reward=reward)), StepRules(StepBudget(1)))


async def test_a_rollout_of_which_nothing_can_be_made_is_replaced():
    """`SegmentError` of the check means that; anything else that it raises ends the step."""
    tried = []

    async def check(rollout: Rollout) -> None:
        tried.append(rollout.session_id)
        if len(tried) == 1:
            raise SegmentError("the encoder failed: ValueError: no list")

    step = await collect(StagedSource(), StepRules(StepBudget(2)), check=check)
    assert Counter(each.cause for each in step.rollouts) == {
        "": 2,
        "finished: the encoder failed: ValueError: no list": 1,
    }

    async def refuse(rollout: Rollout) -> None:
        raise StepError("a segment of 9 tokens is longer than packing_length")

    source = StagedSource()
    with pytest.raises(StepError, match="longer than packing_length"):
        await collect(source, StepRules(StepBudget(2)), check=refuse)
    assert not source.running


async def test_what_a_source_raises_ends_the_step():
    """It is no rollout that failed: everything else is ended, and the error comes through as it is."""
    source = StagedSource(lambda index: Part(rounds=(2, 50, 0), raises=index.member == 1))
    with pytest.raises(OSError, match="no space left"):
        await collect(source, StepRules(StepBudget(4, 2)))
    assert not source.running
    assert len(source.ended) == 2


async def test_a_straggler_is_ended_and_replaced():
    """It alone; another attempt takes its place."""
    slow = Part(rounds=(0, 10**9, 0))
    source = StagedSource(lambda index: slow if (index.member, index.attempt) == (0, 0) else Part())
    step = await collect(source, StepRules(StepBudget(3, 3), deadline_s=0.2))
    [late] = [each for each in step.rollouts if each.use is Disposition.REPLACED]
    assert late.cause == "drained: it still ran after 0.2 s"
    assert {(index.member, index.attempt) for index in source.ended} == {(0, 0)}


async def test_a_rollout_that_ignores_everything_does_not_hold_up_the_step(monkeypatch: pytest.MonkeyPatch):
    """It is named; its place is filled by another one."""
    monkeypatch.setattr(rollout_source, "CANCEL_S", 0.1)
    release = asyncio.Event()

    class Stubborn(StagedSource):
        async def run(self, index: RolloutIndex, resumes: str | None = None) -> ScoredRollout:
            while index.attempt == 0 and not release.is_set():
                with suppress(asyncio.CancelledError):
                    await release.wait()
            return await super().run(index, resumes)

    step = await collect(Stubborn(), StepRules(StepBudget(1), deadline_s=0.05))
    release.set()
    assert step.left == (RolloutIndex(GroupIndex(0, 0), 0),)
    assert [each.use for each in step.rollouts] == [Disposition.REPLACED, Disposition.DELIVERED]
    await asyncio.sleep(0)


async def test_a_collector_that_is_left_ends_what_runs():
    """In the middle of a step, by an error of whoever takes the groups; and when it is cancelled."""
    source = StagedSource(lambda index: Part(rounds=(0, 3 if index.group.number == 0 else 10**9, 0)))

    async def take_one() -> None:
        async with Collector(source, RULES_2X2) as collector:
            async for _ in collector.begin(0).groups():
                raise KeyError("the taker fails")

    with pytest.raises(KeyError):
        await take_one()
    assert not source.running
    assert not source.sessions

    async def wait() -> None:
        async with Collector(source, RULES_2X2) as collector:
            await collector.begin(1).finished()

    waiting = asyncio.create_task(wait())
    while len(source.running) < 2:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not source.running
    assert not source.sessions


async def test_one_step_at_a_time():
    """The next one begins when everything of the one before has ended."""
    async with Collector(StagedSource(), RULES_2X2) as collector:
        first = collector.begin(0)
        with pytest.raises(StepError, match="step 1 cannot begin before step 0 ends"):
            collector.begin(1)
        await first.finished()
        await collector.begin(1).finished()


async def test_ranks_share_a_step():
    """Their groups are those of the budget, each once, and the spare ones of one rank are none of another's."""
    seen: list[GroupIndex] = []
    for rank in range(3):
        rules = StepRules(
            StepBudget(8, 2), rank=rank, world_size=3, over_sampling=1, group_filter=drop_zero_variance, concurrency=1
        )

        def part_of(index: RolloutIndex) -> Part:
            return Part(reward=0.0 if index.group.number == 1 else index.member / 2)

        step = await collect(StagedSource(part_of), rules)
        seen += step.groups
    assert len(seen) == len(set(seen)) == 4
    assert {index.number for index in seen} - {0, 2, 3} == {5}


async def test_sessions_that_nobody_goes_on_from_are_given_back():
    """One whose successor is refused, and one of a group that the next step does not need; their tokens count once."""
    slow = replace(SLOW, is_refused=True)
    rules = replace(RESUMES, concurrency=3, over_sampling=2)
    source = StagedSource(slow_but_first(slow))
    async with Collector(source, rules) as collector:
        first = await collector.begin(0).finished()
        assert len(first.carried) == len(source.sessions) == 2
        last = await collector.begin(1, is_last=True).finished()
        assert not source.sessions
    assert tokens_of(first) + tokens_of(last) + source.lost == source.sampled

    twins = StagedSource(lambda index: slow if index.group.number == 2 else Part(rounds=(0, 5, 0)))
    async with Collector(twins, rules) as collector:
        first = await collector.begin(0).finished()
        assert [len(group.ended) for group in first.carried] == [1, 0]
        last = await collector.begin(1, is_last=True).finished()
        assert not twins.sessions
    assert last.groups == (GroupIndex(0, 1),)
    assert tokens_of(first) + tokens_of(last) == twins.sampled


async def test_a_kept_session_of_an_agent_that_counts_as_failed_is_gone_on_from():
    """How the agent took the end of its turn says nothing about the policy, so it fills no place."""
    source = StagedSource(slow_but_first(replace(SLOW, cut_as=OutcomeKind.TIMED_OUT)))
    async with Collector(source, replace(RESUMES, on_failure=OnFailure.COUNT)) as collector:
        first = await collector.begin(0).finished()
        assert [list(group.cut_short) for group in first.carried] == [[0]]
        await collector.begin(1, is_last=True).finished()
    assert not source.sessions


async def test_a_collector_that_is_cancelled_while_it_is_left_gives_everything_back():
    """Its server may be shared, and nobody else would."""
    is_asked, may_go = asyncio.Event(), asyncio.Event()

    class Busy(StagedSource):
        async def give_back(self, session_id: str) -> None:
            is_asked.set()
            await may_go.wait()
            await super().give_back(session_id)

    source = Busy(slow_but_first())

    async def play() -> None:
        async with Collector(source, RESUMES) as collector:
            await collector.begin(0).finished()

    playing = asyncio.create_task(play())
    await is_asked.wait()
    playing.cancel()
    await asyncio.sleep(0)
    may_go.set()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert not source.sessions


async def test_a_step_that_is_closed_as_it_begins_keeps_no_session_of_the_one_before():
    """Nothing of it has run by then, and the sessions that it was to continue from are given back all the same."""
    source = StagedSource(slow_but_first())
    async with Collector(source, RESUMES) as collector:
        await collector.begin(0).finished()
        assert source.sessions
        await collector.begin(1).close()
    assert not source.sessions
