"""Step collection: runs the rollouts of one step on one rank, and ends everything that it began.

`StepPlan` decides what begins and when a step is complete, `StepPlaces` what fills each place, `RunningRollouts` how
rollouts end.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence

from harness.machine.deadlines import read_end, to_the_end
from harness.rollouts.control.abort_report import Keep
from harness.training.collector.fates import RolloutFate, fate_of
from harness.training.collector.rollout_index import RolloutIndex
from harness.training.collector.rollout_source import RolloutSource
from harness.training.collector.running_rollouts import PlayedRollout, RolloutCheck, RunningRollouts
from harness.training.collector.step_outcome import CarriedGroup, CollectedGroup, CollectedStep
from harness.training.collector.step_places import EndedRollout, StepPlaces
from harness.training.collector.step_plan import RolloutAttempt, StepPlan
from harness.training.collector.step_rules import StepRules


class StepCollection:
    """Collection of `step` in its own task, from construction on.

    Begins with `inherited` groups; `keeps` leaves over-sampled groups to the next step.
    """

    def __init__(
        self,
        step: int,
        source: RolloutSource,
        rules: StepRules,
        check: RolloutCheck,
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
        self._plan = StepPlan(
            wanted=self._places.wanted,
            group_size=rules.budget.group_size,
            over_sampling=rules.over_sampling,
            attempts=rules.attempts,
            most_dropped=rules.most_dropped,
            order=rules.order,
        )
        self._running = RunningRollouts(source, check, deadline_s=rules.deadline_s, off_scale=rules.off_scale)
        self._attempts: dict[RolloutIndex, RolloutAttempt] = {}  # of running rollouts
        self._groups: asyncio.Queue[CollectedGroup | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name=f"collect step {step}")
        self._task.add_done_callback(read_end)  # the caller may never await the end

    async def groups(self) -> AsyncIterator[CollectedGroup]:
        """Yield groups in the step's order, each once due. Raises like `finished`."""
        while (group := await self._groups.get()) is not None:
            yield group
        if not self._plan.is_complete:
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
            while not self._plan.is_complete:
                self._begin()
                self._hand_over()
                if not self._plan.is_complete:
                    for played in await self._running.wait():
                        self._settle(played)
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
            groups=tuple(self._places.delivered),
            rollouts=tuple(self._places.settled()),
            dropped=dict(self._plan.dropped),
            ended_groups=tuple(self._places.over_sampled()),
            carried=self.carried,
            left=tuple(self._running.left),
            generate_s=self.complete_at - self.began_at,
        )

    def _begin(self) -> None:
        while len(self._running) < self._rules.concurrency and (attempt := self._plan.begin()) is not None:
            begun = self._places.begin(attempt)
            self._attempts[begun.index] = attempt
            # A place that the step before filled is settled at once.
            if begun.ended is None:
                self._running.begin(begun.index, begun.resumes)
            else:
                self._settle(PlayedRollout(begun.index, begun.ended))

    def _settle(self, played: PlayedRollout) -> None:
        attempt, ended = self._attempts.pop(played.index), self._judge(played)
        self._places.settle(attempt, ended)
        if self._plan.settle(attempt, ended.fate, ended.cause):
            judge_group = self._rules.group_filter
            reason = None if judge_group is None else judge_group(self._places.rewards(attempt.group))
            if reason:
                self._places.drop(attempt.group, reason)
            self._plan.judge(attempt.group, reason)

    def _judge(self, played: PlayedRollout) -> EndedRollout:
        if played.scored is None:
            return EndedRollout(played.index, None, RolloutFate.REPLACED, played.problem)
        outcome = played.scored.rollout.outcome
        fate = fate_of(outcome.kind, self._rules.on_failure, is_usable=not played.problem)
        cause = "" if fate is RolloutFate.KEPT else f"{outcome.kind}: {played.problem or outcome.detail}"
        return EndedRollout(played.index, played.scored, fate, cause)

    def _hand_over(self) -> None:
        for number in self._plan.hand_over():
            self._groups.put_nowait(self._places.deliver(number))

    async def _end(self) -> None:
        played = await self._running.end_all(Keep.SESSIONS if self._keeps else Keep.SAMPLES)
        for each in played:
            attempt, ended = self._attempts.pop(each.index), self._judge(each)
            if ended.fate is RolloutFate.REPLACED or (each.scored is not None and each.scored.has_kept_session):
                self._places.leave(attempt, ended)
            else:
                self._places.settle(attempt, ended)
        self.carried = self._places.close(keeps=self._keeps)
        # Kept sessions of the step before that no rollout has taken over.
        await asyncio.gather(*map(self._source.give_back, self._places.unclaimed))
