"""A step from rollouts to the learner's update: whole or not at all, and every token accounted for."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import LearnerError, StepError
from harness.samples.encoders import EncodedSample, WholeSampleEncoder
from harness.samples.packs import Pack
from harness.samples.rollout import OutcomeKind, Rollout
from harness.samples.segments import TooLong
from harness.training.collector.groups import RolloutIndex
from harness.training.collector.pipeline import Normalizer, StepPipeline
from harness.training.collector.record.step_ledger import book_step
from harness.training.collector.segment_maker import SegmentMaker
from harness.training.collector.step_outcome import Disposition, PackedStep
from harness.training.collector.step_rules import Partial, StepBudget, StepRules
from harness.training.learner.learner import LossSums, ScriptedLearner, StepReport
from harness.types import Sample
from tests.builders import sample
from tests.collector.staged_source import Part, StagedSource
from tests.collector.training import playing

RULES = StepRules(StepBudget(12, 2), concurrency=4)


def sample_of(index: RolloutIndex, *, version: int = 0) -> tuple[Sample, ...]:
    """One sample of 6 to 9 tokens, all different, of which the last 4 were sampled by `version`."""
    length = 6 + index.member + index.group.number % 3
    tokens = np.arange(length, dtype=np.int32) + 100 * index.group.number + 10 * index.member
    logprobs = -np.arange(1, 5, dtype=np.float32)
    versions = np.full(4, version, dtype=np.int32)
    return (
        sample(
            tokens=tokens,
            response_length=4,
            loss_mask=np.ones(4, dtype=np.uint8),
            rollout_log_probs=logprobs,
            behavior_versions=versions,
            proximal_logprobs=logprobs,
            proximal_versions=versions,
        ),
    )


def source_of(part_of: Callable[[RolloutIndex], Part] | None = None) -> StagedSource:
    """Rollouts of four sampled tokens, with rewards that differ."""
    played = part_of or (lambda index: Part(rounds=(1, 4, index.member), reward=index.member / 2))
    return StagedSource(played, samples_of=sample_of)


class Watched(ScriptedLearner):
    """Calls back for each pack, in its thread."""

    def __init__(self, before: Callable[[int], None]) -> None:
        super().__init__()
        self._before = before
        self.finished: list[float] = []
        self.discarded = 0

    def accumulate(self, pack: Pack) -> LossSums:
        """Say which pack of the step this is."""
        self._before(len(self.packs))
        return super().accumulate(pack)

    def finish_step(self, normalizer: float) -> StepReport:
        """Note the normalizer."""
        self.finished.append(normalizer)
        return super().finish_step(normalizer)

    def discard_step(self) -> None:
        """Count, but not what `finish_step` forgets."""
        self.discarded += 1
        super().discard_step()


async def test_a_step_is_collected_packed_and_learned(tmp_path: Path):
    """Exactly its rollouts, every token of them in the books, and one update."""
    learner = ScriptedLearner()
    async with playing(tmp_path) as field:
        rules = StepRules(StepBudget(8, 4), concurrency=4)
        async with StepPipeline(field.source(), rules, learner, SegmentMaker(400), lookahead=2) as pipeline:
            steps = [await pipeline.run(step, version=0) for step in range(3)]
        assert field.sessions() == 0
    for number, step in enumerate(steps):
        packed = step.packed
        assert len(packed.collected.rollouts) == 8
        assert sum(len(pack.segments) for pack in packed.packs) == 8 == len(packed.samples)
        books = book_step(packed)
        assert books.difference == 0
        assert books.trained == books.generated == packed.normalizer
        assert (step.report.step, step.report.packs) == (number + 1, len(packed.packs))
    assert learner.step == 3


@pytest.mark.parametrize("at", [0, 1, 2])
async def test_a_learner_that_raises_in_the_middle_trains_nothing(at: int):
    """The step is discarded, what still runs is ended, and the next step is a whole one."""

    def fail(pack: int) -> None:
        if pack == at and not learner.discarded:
            raise LearnerError("the loss is not finite")

    learner, source = Watched(fail), source_of()
    async with StepPipeline(source, RULES, learner, SegmentMaker(20), lookahead=0) as pipeline:
        with pytest.raises(LearnerError, match="the loss is not finite"):
            await pipeline.run(0, version=0)
        assert not source.running
        assert (learner.step, learner.packs, learner.finished) == (0, [], [])
        step = await pipeline.run(0, version=0)
    assert (learner.step, learner.finished) == (1, [48.0])
    assert step.report.packs == len(step.packed.packs)


async def test_a_collector_that_fails_while_a_pack_waits(tmp_path: Path):
    """The learner is in its first pack and the second one lies in the queue: nothing is trained, and nobody hangs."""
    is_learning, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold(pack: int) -> None:
        loop.call_soon_threadsafe(is_learning.set)
        assert go_on.wait(30)

    def part_of(index: RolloutIndex) -> Part:
        return Part(rounds=(0, 2, 0), kind=OutcomeKind.ENGINE_FAILED) if index.group.number == 5 else Part(reward=1.0)

    learner, source = Watched(hold), source_of(part_of)
    async with StepPipeline(source, RULES, learner, SegmentMaker(20), lookahead=0) as pipeline:
        running = asyncio.create_task(pipeline.run(0, version=0))
        await is_learning.wait()
        while source.running:
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(StepError, match="has used up its 3 attempts"):
            await running
    assert (learner.step, learner.packs, learner.finished) == (0, [], [])


async def test_a_cancellation_between_two_packs(tmp_path: Path):
    """The pack that is being learned comes to its end first; then the step is forgotten."""
    is_learning, go_on, ended = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def hold(pack: int) -> None:
        if pack == 1:
            loop.call_soon_threadsafe(is_learning.set)
            assert go_on.wait(30)
            ended.append(pack)

    learner, source = Watched(hold), source_of()
    async with StepPipeline(source, RULES, learner, SegmentMaker(20), lookahead=0) as pipeline:
        running = asyncio.create_task(pipeline.run(0, version=0))
        await is_learning.wait()
        running.cancel()
        await asyncio.sleep(0.01)
        assert not running.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert ended == [1]
    assert (learner.step, learner.packs, learner.finished) == (0, [], [])
    assert not source.running


async def test_a_journal_that_cannot_write_ends_the_step_untrained():
    """Whatever it is told of comes before the update."""
    told: list[Any] = []

    class Journal:
        """Full at the second step."""

        async def planned(self, step: int) -> None:
            """Note it."""
            told.append(step)

        async def packed(self, step: PackedStep) -> None:
            """Fail, the second time."""
            told.append(len(step.packs))
            if step.collected.step == 1:
                raise OSError("no space left on device")

    learner = ScriptedLearner()
    async with StepPipeline(source_of(), RULES, learner, SegmentMaker(20), journal=Journal()) as pipeline:
        first = await pipeline.run(0, version=0)
        with pytest.raises(OSError, match="no space left"):
            await pipeline.run(1, version=0)
    assert told == [0, len(first.packed.packs), 1, len(first.packed.packs)]
    assert (learner.step, learner.packs) == (1, [])


@pytest.mark.parametrize(("normalizer", "expected"), [("tokens", 48.0), ("sequences", 12.0), ("rollouts", 12.0)])
async def test_the_normalizer_is_of_the_whole_step(normalizer: str, expected: float):
    """Tokens, segments or rollouts."""
    learner = Watched(lambda _: None)
    async with StepPipeline(
        source_of(), RULES, learner, SegmentMaker(20), normalizer=Normalizer(normalizer)
    ) as pipeline:
        await pipeline.run(0, version=0)
    assert learner.finished == [expected]


async def test_a_rank_without_rollouts_finishes_the_step_too():
    """The other ranks wait for it there; it has no pack and nothing to divide by."""
    learner = Watched(lambda _: None)
    rules = StepRules(StepBudget(2, 2), rank=0, world_size=2)
    async with StepPipeline(source_of(), rules, learner, SegmentMaker(20)) as pipeline:
        step = await pipeline.run(0, version=0)
    assert (learner.finished, step.packed.packs) == ([0.0], ())


async def test_advantages_are_those_of_the_group():
    """Standardized: the better one of two has 1, the other -1."""
    async with StepPipeline(source_of(), RULES, ScriptedLearner(), SegmentMaker(20)) as pipeline:
        step = await pipeline.run(0, version=0)
    assert {round(each.advantage, 2) for each in step.packed.samples} == {-1.0, 1.0}
    assert all((each.advantage > 0) == (each.rollout.member == 1) for each in step.packed.samples)


async def test_what_is_too_old_at_its_hand_over_is_dropped():
    """The rollout is one of the step's all the same."""
    async with StepPipeline(source_of(), RULES, ScriptedLearner(), SegmentMaker(20, max_staleness=1)) as pipeline:
        step = await pipeline.run(0, version=1)
    assert {each.reason for each in step.packed.samples} == {""}
    async with StepPipeline(source_of(), RULES, ScriptedLearner(), SegmentMaker(20, max_staleness=1)) as pipeline:
        step = await pipeline.run(0, version=2)
    assert [dict(each.dropped) for each in step.packed.samples] == [{"stale": 4}] * 12
    assert (step.packed.packs, step.packed.normalizer) == ((), 0)
    assert Counter(each.use for each in step.packed.collected.rollouts) == {Disposition.DELIVERED: 12}


async def test_a_segment_that_is_too_long_ends_the_step_before_anything_is_trained():
    """Where that is an error; both lengths are in the message."""
    learner = ScriptedLearner()
    async with StepPipeline(source_of(), RULES, learner, SegmentMaker(8)) as pipeline:
        with pytest.raises(StepError, match="a segment of 9 tokens is longer than packing_length, which is 8"):
            await pipeline.run(0, version=0)
    assert learner.step == 0
    async with StepPipeline(source_of(), RULES, learner, SegmentMaker(8, too_long=TooLong.CUT)) as pipeline:
        step = await pipeline.run(0, version=0)
    assert sum(each.dropped.get("too_long", 0) for each in step.packed.samples) == 2
    assert book_step(step.packed).difference == 0


class Picky(WholeSampleEncoder):
    """Raises for the first attempt at place 0 of group 2, and touches what was sampled in place 1."""

    def encode(self, rollout: Rollout, sample: Sample) -> EncodedSample:
        """By the ids."""
        encoded = super().encode(rollout, sample)
        assert encoded.segment is not None
        first = int(sample.tokens[0])
        if first == 200:
            raise ValueError("no list")
        if first == 210:
            return replace(encoded, segment=replace(encoded.segment, ids=encoded.segment.ids + 1))
        return encoded


async def test_an_encoder_that_fails_costs_its_rollout():
    """Every attempt has the same tokens here, so the step fails, and names what the encoder said."""
    learner = ScriptedLearner()
    async with StepPipeline(source_of(), RULES, learner, SegmentMaker(20, Picky())) as pipeline:
        with pytest.raises(StepError, match=r"the encoder failed: (ValueError: no list|SegmentError: ids at token 0)"):
            await pipeline.run(0, version=0)
    assert learner.step == 0


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_groups_that_are_resumed_must_be_young_enough(max_staleness: int):
    """With less than two versions all of them would be dropped."""
    rules = StepRules(StepBudget(4), over_sampling=1, partial=Partial.RESUME)
    with pytest.raises(StepError, match=f"max_staleness of 2 or more, it is {max_staleness}: a group begins while"):
        StepPipeline(source_of(), rules, ScriptedLearner(), SegmentMaker(20, max_staleness=max_staleness))


async def test_what_was_resumed_is_trained():
    """Begun ahead of one step and handed over in the next, a group is two versions old: as old as it may be."""
    live, begun = 0, dict[RolloutIndex, int]()

    def part_of(index: RolloutIndex) -> Part:
        begun.setdefault(index, live)
        return Part(rounds=(1, 4 + 3 * index.group.number, 1), reward=index.member / 2)

    source = StagedSource(part_of, samples_of=lambda index: sample_of(index, version=begun[index]))
    rules = StepRules(StepBudget(8, 2), concurrency=64, over_sampling=2, partial=Partial.RESUME)
    ages = set[int]()
    async with StepPipeline(
        source, rules, ScriptedLearner(), SegmentMaker(20, max_staleness=2), lookahead=0
    ) as pipeline:
        for step in range(4):
            for sample in (await pipeline.run(step, version=step)).packed.samples:
                assert sample.reason == ""
                if sample.rollout.group.step < step:
                    ages.add(step - begun[sample.rollout])
            live = step + 1
    assert max(ages) == 2


async def test_the_next_step_begins_while_this_one_is_learned():
    """Where its rollouts may be older than its weights; nothing is begun beyond the last step."""
    source = source_of()
    begun_while_learning: list[set[int]] = []

    def look(pack: int) -> None:
        until = time.monotonic() + 30
        while (begun := {index.group.step for index in [*source.began]}) == {0} and time.monotonic() < until:
            time.sleep(0.001)
        begun_while_learning.append(begun)

    learner = Watched(look)
    async with StepPipeline(
        source, RULES, learner, SegmentMaker(20, max_staleness=1), lookahead=0, last_step=2
    ) as pipeline:
        for step in range(3):
            trained = await pipeline.run(step, version=step)
            assert trained.packed.collected.step == step
            await asyncio.sleep(0.01)
    assert {0, 1} in begun_while_learning
    assert {index.group.step for index in source.began} == {0, 1, 2}
    assert len(source.began) == 36


async def test_an_update_that_fails_ends_the_step_ahead_too():
    """Nothing that it began runs on, and the same step can be run again."""

    class Failing(ScriptedLearner):
        """Raises once, instead of its first update."""

        has_failed = False

        def finish_step(self, normalizer: float) -> StepReport:
            """Fail, the first time."""
            if not self.has_failed:
                self.has_failed = True
                raise LearnerError("the gradient is not finite")
            return super().finish_step(normalizer)

    def part_of(index: RolloutIndex) -> Part:
        is_ahead = index.group.step == 1 and not learner.has_failed
        return Part(rounds=(0, 10**6 if is_ahead else 2, 0), reward=index.member / 2)

    learner, source = Failing(), source_of(part_of)
    async with StepPipeline(source, RULES, learner, SegmentMaker(20, max_staleness=1), lookahead=0) as pipeline:
        with pytest.raises(LearnerError, match="the gradient is not finite"):
            await pipeline.run(0, version=0)
        assert 1 in {index.group.step for index in source.began}
        assert not source.running
        assert not source.sessions
        assert (await pipeline.run(0, version=0)).report.step == 1


async def test_nothing_is_encoded_while_a_pack_waits():
    """One pack is with the learner, one in the queue: no more segments live than those and the look-ahead."""
    encoded: list[int] = []
    seen: list[int] = []

    class Counted(WholeSampleEncoder):
        """Counts; every rollout is tried out once before."""

        def encode(self, rollout: Rollout, sample: Sample) -> EncodedSample:
            """As ever."""
            encoded.append(1)
            return super().encode(rollout, sample)

    def wait(pack: int) -> None:
        time.sleep(0.1)  # all that can be encoded meanwhile is
        seen.append(len(encoded) - 24)

    source = StagedSource(lambda index: Part(reward=index.member / 2), samples_of=sample_of)
    rules = StepRules(StepBudget(24, 2), concurrency=24)
    async with StepPipeline(source, rules, Watched(wait), SegmentMaker(30, Counted()), lookahead=1) as pipeline:
        step = await pipeline.run(0, version=0)
    learned = 0
    for made, pack in zip(seen, step.packed.packs, strict=True):
        assert made - learned <= 1 + 2 * 5
        learned += len(pack.segments)
    assert seen[0] < 24
