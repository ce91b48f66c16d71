"""Step pipeline: generates, packs and learns a step concurrently.

    async with StepPipeline(source, rules, learner, SegmentMaker(packing_length=8192)) as pipeline:
        for step in range(100):
            trained = await pipeline.run(step, version)

With `max_staleness` above 0, the next step's rollouts begin once those of this step are complete, and continue during
the weight update.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from typing import Self, TypeVar

from harness.errors import StepError
from harness.machine.deadlines import to_the_end
from harness.samples.packs import Pack, PackStream
from harness.samples.rollout import Rollout
from harness.training.collector.collector import Collector, StepCollection
from harness.training.collector.groups import (
    Advantage,
    AdvantageRule,
    CreditRule,
    RolloutIndex,
    credit_turns,
    credit_values,
    standardize,
)
from harness.training.collector.rollout_source import RolloutSource
from harness.training.collector.segment_maker import MadeSegment, SegmentedSample, SegmentMaker
from harness.training.collector.step_outcome import PackedStep, PackFacts, StepJournal, StepTimes, TrainedStep
from harness.training.collector.step_rules import Partial, StepRules
from harness.training.learner.learner import Learner

_T = TypeVar("_T")

_Queue = asyncio.Queue[Pack | None]

_RESUMED_STALENESS = 2  # one version for the step that is collected ahead, one for the step that hands the group over
_LONG = 20_000  # tokens: beyond, encoding would block the event loop for milliseconds


class Normalizer(StrEnum):
    """Divisor of the summed loss of a step."""

    TOKENS = "tokens"
    """With loss mask 1."""
    SEQUENCES = "sequences"
    """Segments."""
    ROLLOUTS = "rollouts"
    """Counted ones included."""


class StepPipeline:
    """Async context manager that trains `learner` on rollouts of `source`, on one rank, step by step.

    Args:
        source: Runs rollouts.
        rules: Collector settings.
        learner: Takes packs. The caller sends weights to engines between steps.
        maker: Makes segments.
        lookahead: See `PackStream`. A large one holds back all of a small step.
        position_rows: See `Pack.of`.
        advantages: From rewards of a group.
        credit: Replaces `advantages` by turn.
        by_value: Credits turns by the samples' `turn_values` instead (`credit_values`).
        normalizer: Divisor of the loss.
        journal: Receives every step before it is trained.
        last_step: No rollout begins beyond it.

    Raises `StepError` if resumed groups would be too old to train.
    """

    def __init__(
        self,
        source: RolloutSource,
        rules: StepRules,
        learner: Learner,
        maker: SegmentMaker,
        *,
        lookahead: int = 64,
        position_rows: int = 1,
        advantages: AdvantageRule = standardize,
        credit: CreditRule | None = None,
        by_value: bool = False,
        normalizer: Normalizer = Normalizer.TOKENS,
        journal: StepJournal | None = None,
        last_step: int | None = None,
    ) -> None:
        if rules.partial is Partial.RESUME and maker.max_staleness < _RESUMED_STALENESS:
            raise StepError(
                f'partial="resume" needs a max_staleness of {_RESUMED_STALENESS} or more, it is {maker.max_staleness}:'
                " a group begins while the step before is learned and is handed over one step later, so all that was"
                " sampled before would be dropped as stale"
            )
        self._collector = Collector(source, rules, self._try_out)
        self._learner = learner
        self._maker = maker
        self._lookahead = lookahead
        self._position_rows = position_rows
        self._advantages = advantages
        self._credit = credit
        self._by_value = by_value
        self._normalizer = normalizer
        self._journal = journal
        self._last_step = last_step
        # A single thread: an allocator keeps the memory of every thread, and activations are large.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._ahead: StepCollection | None = None
        self._encoding = asyncio.Lock()  # encoders need not be safe for several threads at once

    async def __aenter__(self) -> Self:
        await self._collector.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._collector.__aexit__()
        finally:
            self._thread.shutdown(wait=False)  # idle by now

    async def run(self, step: int, version: int) -> TrainedStep:
        """Collect, pack and learn `step` while policy `version` is live.

        Raises `StepError`, `LearnerError` or a journal error; nothing is then trained or running. If cancelled in
        `finish_step`, raises after it: the step is trained.
        """
        began = time.monotonic()
        collection, self._ahead = self._ahead, None
        if collection is None or collection.step != step:
            collection = await self._begin(step)
        flow = _StepFlow(PackStream(self._maker.packing_length, self._lookahead, self._position_rows))
        queue: _Queue = asyncio.Queue(maxsize=1)
        try:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._pack(collection, version, queue, flow), name=f"pack step {step}")
                    tasks.create_task(self._learn(queue, flow), name=f"learn step {step}")
                    tasks.create_task(self._go_ahead(collection), name=f"go ahead of step {step}")
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from errors.exceptions[0].__cause__
            packed = PackedStep(
                collected=await collection.finished(),
                version=version,
                samples=tuple(flow.samples),
                packs=tuple(flow.packs),
                encoder_counts=dict(flow.encoder_counts),
                normalizer=flow.normalizers[self._normalizer],
            )
            if self._journal is not None:
                await self._journal.packed(packed)
            finishing = time.monotonic()
            report = await self._in_thread(partial(self._learner.finish_step, packed.normalizer))
        except BaseException:
            await to_the_end(self._abandon(collection))
            raise
        ended = time.monotonic()
        generating = [(each.began_at, each.complete_at) for each in (collection, self._ahead) if each is not None]
        times = StepTimes(
            total_s=ended - began,
            forward_s=sum(end - start for start, end in flow.learned),
            finish_s=ended - finishing,
            pack_waits_s=flow.pack_waits_s,
            overlap_s=sum(
                max(0.0, min(end, until) - max(start, since))
                for start, end in flow.learned
                for since, until in generating
            ),
        )
        return TrainedStep(packed, report, times)

    async def _begin(self, step: int) -> StepCollection:
        if self._journal is not None:
            await self._journal.planned(step)
        return self._collector.begin(step, is_last=step == self._last_step)

    async def _go_ahead(self, collection: StepCollection) -> None:
        await collection.finished()
        # With a staleness of 0, no rollout may be older than the weights.
        if self._maker.max_staleness and collection.step != self._last_step:
            self._ahead = await self._begin(collection.step + 1)

    async def _pack(self, collection: StepCollection, version: int, queue: _Queue, flow: "_StepFlow") -> None:
        async for group in collection.groups():
            flow.normalizers[Normalizer.ROLLOUTS] += len(group.rollouts) + group.counted
            advantages: Sequence[Advantage] = ()
            if group.rollouts and self._by_value:
                advantages = credit_values(group.rollouts)
            elif group.rollouts and self._credit is not None:
                advantages = credit_turns(self._credit, group.rollouts)
            elif group.rollouts:
                advantages = self._advantages(group.rewards)
            for scored, advantage in zip(group.rollouts, advantages, strict=True):
                making = self._maker.make(scored, advantage, version)
                for _ in scored.rollout.samples:
                    pack = await self._encode(scored.rollout, partial(flow.add_next, making))
                    await self._hand_on(pack, queue)
        for pack in flow.stream.finish():
            await self._hand_on(pack, queue)
        await queue.put(None)

    async def _hand_on(self, pack: Pack | None, queue: _Queue) -> None:
        if pack is not None:
            await queue.put(pack)
            # Until the learner takes the pack, encode nothing: this bounds the segments in memory.
            await queue.join()

    async def _learn(self, queue: _Queue, flow: "_StepFlow") -> None:
        def accumulate(pack: Pack) -> str:
            self._learner.accumulate(pack)
            return pack.digest()

        while True:
            asked_at = time.monotonic()
            pack = await queue.get()
            queue.task_done()
            if pack is None:
                return
            began_at = time.monotonic()
            digest = await self._in_thread(partial(accumulate, pack))
            flow.note_learned(pack, digest, asked_at, began_at)
            del pack  # free it before waiting for the next one

    async def _try_out(self, rollout: Rollout) -> None:
        await self._encode(rollout, partial(self._maker.try_out, rollout))

    async def _encode(self, rollout: Rollout, call: Callable[[], _T]) -> _T:
        async with self._encoding:
            if sum(sample.tokens.size for sample in rollout.samples) < _LONG:
                return call()
            return await asyncio.to_thread(call)

    async def _abandon(self, collection: StepCollection) -> None:
        for each in filter(None, (collection, self._ahead)):
            await each.close()
        self._ahead = None
        await self._in_thread(self._learner.discard_step)

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        # A thread cannot be cancelled, so a cancellation waits for it: the learner takes one call at a time.
        return await to_the_end(asyncio.get_running_loop().run_in_executor(self._thread, call))


class _StepFlow:
    """Samples, packs and times of one step."""

    def __init__(self, stream: PackStream) -> None:
        self.stream = stream
        self.samples: list[SegmentedSample] = []
        self.packs: list[PackFacts] = []
        self.encoder_counts: Counter[str] = Counter()
        self.normalizers: Counter[Normalizer] = Counter()
        self.learned: list[tuple[float, float]] = []
        self.pack_waits_s = 0.0
        self._names: list[tuple[RolloutIndex, int]] = []  # of the segments in the stream, by number

    def add_next(self, making: Iterator[MadeSegment]) -> Pack | None:
        """Make the next segment. Return a pack if one is ready."""
        made = next(making)
        facts = made.facts
        self.samples.append(facts)
        self.encoder_counts.update(made.counts)
        if made.segment is None:
            return None
        self.normalizers[Normalizer.TOKENS] += facts.trained + facts.appended
        self.normalizers[Normalizer.SEQUENCES] += 1
        self._names.append((facts.rollout, facts.sample))
        return self.stream.add(made.segment)

    def note_learned(self, pack: Pack, digest: str, asked_at: float, began_at: float) -> None:
        self.pack_waits_s += began_at - asked_at
        self.learned.append((began_at, time.monotonic()))
        names = tuple(self._names[number] for number in pack.numbers)
        self.packs.append(PackFacts(digest, len(pack), int(pack.loss_mask.sum()), names))
