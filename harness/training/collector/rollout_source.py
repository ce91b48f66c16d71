"""Rollout source: the seam between a collector and prompts, agents and rewards.

A source knows no groups, budgets or attempts. Ending its rollouts is bounded: the source gets its time, then tasks are
cancelled, then a task that ignores that is left behind and logged. `SessionSource` plays the caller's tasks with a
`SessionManager`. It knows the session of each rollout, so ending rollouts ends no other sessions.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from harness.errors import SegmentError
from harness.machine.deadlines import OBEY_S, attempt, read_end
from harness.machine.log import get_logger
from harness.rollouts.agents.task import AgentTask
from harness.rollouts.control.abort_report import AbortBudget, Keep, was_cut_short
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import ENDED_WELL, Rollout, describe_judgement, stamp_judgement
from harness.samples.turn_rewards import RolloutReward, reward_turns, value_turns
from harness.training.collector.groups import RolloutIndex, ScoredRollout
from harness.training.collector.sampling_scale import OffScale, stamp_scale
from harness.training.collector.step_outcome import Disposition
from harness.training.collector.step_places import EndedRollout
from harness.training.collector.step_rules import DISPOSITIONS

ROLLOUTS_NOT_ENDED = "rollouts_not_ended"
ROLLOUT_LEFT = "rollout_left"
SURPLUS_ROLLOUT_RAISED = "surplus_rollout_raised"

END_S = 120.0
"""Limit for the source, which has its own."""
CANCEL_S = 30.0
"""Limit for a cancelled rollout."""

RolloutCheck = Callable[[Rollout], Awaitable[None]]
"""Raises `SegmentError` to replace a rollout. Other exceptions fail the step."""

_LARGEST_REWARD = 3e38  # about the largest float32

_log = get_logger(__name__)


class RolloutSource(Protocol):
    """Runs any number of rollouts at once."""

    async def run(self, index: RolloutIndex, resumes: str | None = None) -> ScoredRollout:
        """Run and score one rollout. Exceptions fail the step; rollout failures go into its outcome or `error`.

        `resumes` is the kept session of the same rollout, to continue. If cancelled, leave no session or agent behind,
        in bounded time.
        """

    async def end(self, running: Mapping[RolloutIndex, asyncio.Task[ScoredRollout]], keep: Keep) -> None:
        """End these rollouts only, so that their tasks are done, in bounded time.

        With a session, return unscored; without, cancel. `Keep.SESSIONS` keeps sessions on the server and scores what
        ended already.
        """

    async def give_back(self, session_id: str) -> None:
        """Delete a kept session. Bounded; logs failures."""


class RunningRollouts:
    """Rollouts of `source`, checked once scored, ended after `deadline_s`."""

    def __init__(
        self, source: RolloutSource, check: RolloutCheck | None, *, deadline_s: float, off_scale: OffScale
    ) -> None:
        self._source = source
        self._check = check
        self._deadline_s = deadline_s
        self._off_scale = off_scale
        self._rollouts: dict[RolloutIndex, asyncio.Task[ScoredRollout]] = {}
        self._watches: dict[RolloutIndex, asyncio.Task[EndedRollout]] = {}
        self.left: list[RolloutIndex] = []
        """Rollouts that ignored their cancellation."""

    def __len__(self) -> int:
        return len(self._watches)

    def begin(self, index: RolloutIndex, resumes: str | None) -> None:
        """Begin a rollout, or continue the session `resumes`."""
        self._watches[index] = asyncio.create_task(self._watch(index, resumes), name=f"watch {index}")

    async def wait(self) -> list[EndedRollout]:
        """Wait for ended rollouts. Raises what the source or check raised."""
        await asyncio.wait(self._watches.values(), return_when=asyncio.FIRST_COMPLETED)
        ended = sorted(index for index, watch in self._watches.items() if watch.done())
        return [self._watches.pop(index).result() for index in ended]

    async def end_all(self, keep: Keep) -> list[EndedRollout]:
        """End all rollouts. Bounded; never raises."""
        await self._end(list(self._rollouts), keep)
        for index in self.left:
            if index in self._watches:
                self._watches[index].cancel()
        watches, self._watches = self._watches, {}
        if watches:
            _, late = await asyncio.wait(watches.values(), timeout=CANCEL_S)
            for watch in late:
                watch.cancel()
            if late:
                await asyncio.wait(late, timeout=OBEY_S)
        return [_end_of(index, watches[index]) for index in sorted(watches)]

    async def _watch(self, index: RolloutIndex, resumes: str | None) -> EndedRollout:
        rollout = asyncio.create_task(self._source.run(index, resumes), name=f"rollout {index}")
        self._rollouts[index] = rollout
        try:
            await asyncio.wait({rollout}, timeout=self._deadline_s)
            is_late = not rollout.done()
            if is_late:
                await self._end([index], Keep.SAMPLES)
        finally:
            del self._rollouts[index]
        late = f"it still ran after {self._deadline_s:g} s"
        if not rollout.done():
            return EndedRollout(index, None, f"{late}, and ignores its cancellation")
        if rollout.cancelled():
            return EndedRollout(index, None, late if is_late else "it was cancelled")
        scored = rollout.result()
        scored = replace(scored, rollout=stamp_scale(scored.rollout, self._off_scale))
        return EndedRollout(index, scored, late if is_late else await self._find_problem(scored))

    async def _find_problem(self, scored: ScoredRollout) -> str:
        if DISPOSITIONS[scored.rollout.outcome.kind] is not Disposition.DELIVERED:
            return ""
        if scored.reward is None or not abs(scored.reward) <= _LARGEST_REWARD:  # rejects NaN too
            return scored.error or f"its reward is {scored.reward}"
        try:
            if self._check is not None:
                await self._check(scored.rollout)
        except SegmentError as error:
            return error.message
        return ""

    async def _end(self, indices: Collection[RolloutIndex], keep: Keep) -> None:
        running = {index: self._rollouts[index] for index in indices if not self._rollouts[index].done()}
        if not running:
            return
        problem = await attempt(partial(self._source.end, running, keep), END_S, name=f"end {len(running)} rollouts")
        late = [rollout for rollout in running.values() if not rollout.done()]
        if problem or late:
            _log.warning(ROLLOUTS_NOT_ENDED, problem=problem, rollouts=len(late))
        for rollout in late:
            rollout.cancel()
        if late:
            await asyncio.wait(late, timeout=CANCEL_S)
        for index, rollout in running.items():
            if not rollout.done():
                rollout.add_done_callback(read_end)
                self.left.append(index)
                _log.warning(ROLLOUT_LEFT, rollout=str(index))


def _end_of(index: RolloutIndex, watch: asyncio.Task[EndedRollout]) -> EndedRollout:
    if not watch.done() or watch.cancelled():
        return EndedRollout(index, None, "it was cancelled")
    error = watch.exception()
    if error is not None:
        _log.warning(SURPLUS_ROLLOUT_RAISED, rollout=str(index), error=f"{type(error).__name__}: {error}")
        return EndedRollout(index, None, str(error))
    return watch.result()


MakeTask = Callable[[RolloutIndex], AgentTask]
"""One prompt per group, and a separate working directory per attempt."""

Reward = Callable[[RolloutIndex, Rollout], Awaitable[float | RolloutReward | None]]
"""Reward, optionally by turn; None or an exception for none."""


class SessionSource:
    """`RolloutSource` that seeds sessions from `training_seed`, unless their task does."""

    def __init__(
        self,
        manager: SessionManager,
        make_task: MakeTask,
        reward: Reward,
        *,
        training_seed: int = 0,
        budget: AbortBudget | None = None,
    ) -> None:
        self._manager = manager
        self._make_task = make_task
        self._reward = reward
        self._training_seed = training_seed
        self._budget = budget or AbortBudget()
        self._tasks: dict[RolloutIndex, AgentTask] = {}  # of unfinished rollouts
        self._scoring: dict[RolloutIndex, asyncio.Task[ScoredRollout]] = {}
        self._told: dict[RolloutIndex, Keep] = {}  # rollouts that the collector ends

    async def run(self, index: RolloutIndex, resumes: str | None = None) -> ScoredRollout:
        task = self._make_task(index)
        sampling = {"seed": index.seed(self._training_seed), **task.session.get("sampling", {})}
        task = replace(task, session={**task.session, "sampling": sampling}, resumes=resumes)
        self._tasks[index] = task
        try:
            rollout = await self._manager.run(task)
            del self._tasks[index]
            keep = self._told.get(index)
            if rollout.outcome.kind in ENDED_WELL and keep in (None, Keep.SESSIONS):
                return await self._score(index, rollout)
            has_kept_session = keep is Keep.SESSIONS and rollout.session_id is not None and was_cut_short(rollout)
            return ScoredRollout(index, rollout, None, has_kept_session=has_kept_session)
        finally:
            self._tasks.pop(index, None)
            self._told.pop(index, None)

    async def end(self, running: Mapping[RolloutIndex, asyncio.Task[ScoredRollout]], keep: Keep) -> None:
        for index in running:
            self._told.setdefault(index, keep)
            # Cancel scoring, unless sessions are kept: then the reward still arrives.
            if index in self._scoring and keep is not Keep.SESSIONS:
                self._scoring[index].cancel()
        live = {id(task): session_id for session_id, task in self._manager.live.items()}
        sessions = [live[id(task)] for index in running if id(task := self._tasks.get(index)) in live]
        for index in running.keys() & self._tasks.keys():
            if id(self._tasks[index]) not in live:
                running[index].cancel()  # it waits for its session
        await self._manager.abort(running.values(), sessions=sessions, keep=keep, budget=self._budget)

    async def give_back(self, session_id: str) -> None:
        await self._manager.delete(session_id)

    async def _score(self, index: RolloutIndex, rollout: Rollout) -> ScoredRollout:
        async def score() -> ScoredRollout:
            reward = await self._reward(index, rollout)
            if not isinstance(reward, RolloutReward):
                return ScoredRollout(index, rollout, reward)
            samples = reward_turns(rollout.samples, rollout.session, reward.turns, reward.reward)
            samples = value_turns(samples, reward.values)
            samples = stamp_judgement(samples, describe_judgement(reward.figures, reward.reason))
            return ScoredRollout(index, replace(rollout, samples=samples), reward.reward)

        scoring = self._scoring[index] = asyncio.create_task(score())
        try:
            await asyncio.wait({scoring})
        finally:
            del self._scoring[index]
            scoring.add_done_callback(read_end)  # this rollout may be cancelled
            scoring.cancel()
        if scoring.cancelled():
            return ScoredRollout(index, rollout, None, "its reward was cancelled")
        error = scoring.exception()
        if error is not None:
            return ScoredRollout(index, rollout, None, f"its reward failed: {type(error).__name__}: {error}")
        return scoring.result()
