"""Collector of steps, one after the other, for one rank of a trainer.

    async with Collector(source, StepRules(StepBudget(32, group_size=8), over_sampling=2)) as collector:
        collection = collector.begin(0)
        async for group in collection.groups():
            ...  # whole, in the order that the rules ask for
        step = await collection.finished()

A collector ends only rollouts that it began, so several can share a session server.
"""

import asyncio
from types import TracebackType
from typing import Self

from harness.errors import StepError
from harness.machine.deadlines import to_the_end
from harness.samples.rollout import Rollout
from harness.training.collector.rollout_source import RolloutSource
from harness.training.collector.running_rollouts import RolloutCheck
from harness.training.collector.step_collection import StepCollection
from harness.training.collector.step_outcome import CarriedGroup
from harness.training.collector.step_rules import Partial, StepRules


async def take_all(rollout: Rollout) -> None:
    """Accept every rollout."""


class Collector:
    """Async context manager for one step at a time. `check` runs for every rewarded rollout."""

    def __init__(self, source: RolloutSource, rules: StepRules, check: RolloutCheck = take_all) -> None:
        self._source = source
        self._rules = rules
        self._check = check
        self._current: StepCollection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await to_the_end(self._leave())  # leftovers would burden all clients of the server

    def begin(self, step: int, *, is_last: bool = False) -> StepCollection:
        """Begin `step`. If it `is_last`, keep nothing for a next step.

        Raises `StepError` while the step before is not over.
        """
        if self._current is not None and not self._current.is_over:
            raise StepError(
                f"step {step} cannot begin: step {self._current.step} is not over; await its end, or close it"
            )
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
