"""Collector of steps, one after the other, for one rank of a trainer.

    async with Collector(source, StepRules(StepBudget(32, group_size=8), over_sampling=2)) as collector:
        collection = collector.begin(0)
        async for group in collection.groups():
            ...  # whole, in the order that the rules ask for
        step = await collection.finished()

A collector ends only rollouts that it began, so several can share a session server. `StepPlaces` decides what begins
and when a step is complete, `RunningRollouts` how rollouts end.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Self

from harness.errors import StepError
from harness.machine.deadlines import read_end, to_the_end
from harness.rollouts.control.abort_report import Keep
from harness.training.collector.rollout_source import RolloutCheck, RolloutSource, RunningRollouts
from harness.training.collector.step_outcome import CarriedGroup, CollectedGroup, CollectedStep
from harness.training.collector.step_places import StepPlaces
from harness.training.collector.step_rules import Partial, StepRules


class Collector:
    """Async context manager for one step at a time. `check` runs for every rewarded rollout."""

    def __init__(self, source: RolloutSource, rules: StepRules, check: RolloutCheck | None = None) -> None:
        self._source = source
        self._rules = rules
        self._check = check
        self._current: StepCollection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await to_the_end(self._leave())  # leftovers would burden all clients of the server

    def begin(self, step: int, *, is_last: bool = False) -> "StepCollection":
        """Begin `step`. If it `is_last`, keep nothing for a next one. Raises `StepError` during the step before."""
        if self._current is not None and not self._current.is_over:
            raise StepError(f"step {step} cannot begin before step {self._current.step} ends: await it, or close it")
        self._current = StepCollection(
            step,
            self._source,
            self._rules,
            self._check,
            inherited=self._carried(),
            keeps=self._rules.partial is Partial.RESUME and not is_last,
        )
        return self._current

    async def _leave(self) -> None:
        if self._current is not None:
            await self._current.close()
        # A killed collector cannot do this; the server then deletes its sessions after a day.
        kept = [scored.rollout.session_id for group in self._carried() for scored in group.cut_short.values()]
        await asyncio.gather(*(self._source.give_back(session_id) for session_id in kept if session_id is not None))

    def _carried(self) -> tuple[CarriedGroup, ...]:
        return () if self._current is None else self._current.carried


class StepCollection:
    """Task that collects `step`. Begins with `inherited` groups; `keeps` leaves surplus groups to the next step."""

    def __init__(
        self,
        step: int,
        source: RolloutSource,
        rules: StepRules,
        check: RolloutCheck | None,
        *,
        inherited: Sequence[CarriedGroup] = (),
        keeps: bool = False,
    ) -> None:
        self.step = step
        self.carried = tuple(inherited)
        """Groups for the next step, with sessions that the caller owns once this step is over."""
        self.began_at = self.complete_at = math.inf
        """Monotonic times."""
        self._source = source
        self._rules = rules
        self._keeps = keeps
        self._places = StepPlaces(step, rules, inherited)
        self._running = RunningRollouts(source, check, deadline_s=rules.deadline_s, off_scale=rules.off_scale)
        self._groups: asyncio.Queue[CollectedGroup | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name=f"collect step {step}")
        self._task.add_done_callback(read_end)  # the caller may never await the end

    async def groups(self) -> AsyncIterator[CollectedGroup]:
        """Yield groups in the step's order, each once due. Raises like `finished`."""
        while (group := await self._groups.get()) is not None:
            yield group
        if not self._places.is_complete:
            await self.finished()

    @property
    def is_over(self) -> bool:
        """True once nothing runs."""
        return self._task.done()

    async def finished(self) -> CollectedStep:
        """Return the step once everything that it began has ended.

        Raises `StepError` with causes, or what the source, filter or check raised. Cancelling the caller does not stop
        it.
        """
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        """End the step. Bounded."""
        self._task.cancel()
        await to_the_end(asyncio.wait({self._task}))

    async def _run(self) -> CollectedStep:
        self.began_at = time.monotonic()
        try:
            while not self._places.is_complete:
                while len(self._running) < self._rules.concurrency and (due := self._places.begin()) is not None:
                    self._running.begin(due.index, due.resumes)
                self._hand_over()
                if not self._places.is_complete:
                    for ended in await self._running.wait():
                        self._places.settle(ended)
            self._hand_over()
        except BaseException:
            self._keeps = False
            raise
        finally:
            self.complete_at = time.monotonic()
            # Readers of `groups` get their end even if this step failed, and everything ends before `_run` does.
            self._groups.put_nowait(None)
            await to_the_end(self._end())
        return CollectedStep(
            step=self.step,
            groups=self._places.delivered,
            rollouts=tuple(self._places.settled()),
            dropped=dict(self._places.dropped),
            ended_groups=tuple(self._places.over_sampled()),
            carried=self.carried,
            left=tuple(self._running.left),
            generate_s=self.complete_at - self.began_at,
        )

    def _hand_over(self) -> None:
        for group in self._places.hand_over():
            self._groups.put_nowait(group)

    async def _end(self) -> None:
        for ended in await self._running.end_all(Keep.SESSIONS if self._keeps else Keep.SAMPLES):
            self._places.leave(ended)
        self.carried = self._places.close(keeps=self._keeps)
        # Kept sessions of the step before that no rollout has taken over.
        await asyncio.gather(*map(self._source.give_back, self._places.unclaimed))
