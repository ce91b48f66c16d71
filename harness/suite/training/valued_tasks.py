"""Rewards with turn values: each turn of a scored rollout is forked, before its step trains it."""

from dataclasses import dataclass, replace

from harness.errors import ScenarioError
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import ENDED_WELL, Rollout
from harness.samples.turn_rewards import RolloutReward
from harness.samples.turn_values import TurnValue, values_of
from harness.suite.judge.groups import value_of
from harness.suite.training.scenario_tasks import ScenarioTasks
from harness.training.collector.groups import RolloutIndex


@dataclass(frozen=True, slots=True)
class ValuedTasks:
    """Rewards of `tasks`, with values of all turns but the first, whose state the whole group shares."""

    tasks: ScenarioTasks
    manager: SessionManager
    forks: int
    """Of each turn."""

    async def reward(self, index: RolloutIndex, rollout: Rollout) -> RolloutReward | None:
        """Score and fork `rollout`. Raises `ScenarioError` without a finite reward, or if no fork of a turn has one."""
        scored = await self.tasks.reward(index, rollout)
        if scored is None or rollout.session_id is None:
            return scored
        _, *turns = values_of(rollout.samples)
        return scored._replace(values={turn: await self._value(index, rollout.session_id, turn) for turn in turns})

    async def _value(self, index: RolloutIndex, session_id: str, turn: int) -> TurnValue:
        task = self.tasks.task_of(index)
        task = replace(task, workdir=task.workdir / f"turn-{turn}")
        forks = await self.manager.fork(session_id, task, turn=turn, count=self.forks)
        scores = [await self.tasks.reward(index, fork) for fork in forks if fork.outcome.kind in ENDED_WELL]
        value = value_of([score.reward for score in scores if score is not None])
        if value is None:
            raise ScenarioError(f"turn {turn}: expected a fork with a reward, got none: {forks[0].outcome.detail}")
        return value
