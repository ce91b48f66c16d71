"""Session source: rollouts of a `SessionManager`, with the caller's tasks and rewards.

Knows the session of each rollout, so ending rollouts ends no other sessions.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from harness.machine.deadlines import read_end
from harness.rollouts.agents.task import AgentTask
from harness.rollouts.control.abort_report import AbortBudget, Keep, was_cut_short
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import ENDED_WELL, Rollout, describe_judgement, stamp_judgement
from harness.samples.turn_rewards import RolloutReward, reward_turns, value_turns
from harness.training.collector.groups import RolloutIndex, ScoredRollout

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
