"""Tasks and rewards of a scenario's rollouts, by index. They depend on index and run seed alone (I10).

Groups take the prompts in turn. The metadata `group_seed`, equal within a group, lets scenarios generate tasks.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import ScenarioError
from harness.machine.disk import make_way
from harness.rollouts.agents.task import Agent, AgentTask
from harness.rollouts.manager import SessionManager
from harness.rollouts.seeds import derive_seed
from harness.samples.rollout import ENDED_WELL, Rollout
from harness.samples.turn_rewards import RolloutReward, values_of
from harness.sessions.inheritance import find_drift
from harness.suite.judge.groups import value_of
from harness.suite.judge.reward import StandingCheck
from harness.suite.scenarios.folder import ScenarioFolder
from harness.suite.scenarios.scenario import Prompt
from harness.tokens.matching import normal_form
from harness.training.collector.groups import GroupIndex, RolloutIndex
from harness.types import Json

GROUP_SEED = "group_seed"


@dataclass(frozen=True, slots=True)
class Workdirs:
    """Agents' working directories below `path`: a folder per step, in it one per rollout."""

    path: Path

    def of(self, index: RolloutIndex) -> Path:
        group = index.group
        return self.path / str(group.step) / f"{group.number}-{index.member}-{index.attempt}"

    def forget(self, before: int, carried: Collection[GroupIndex]) -> None:
        """Remove directories of groups begun before step `before`, except `carried` ones. Ignores errors."""
        for folder in self.path.glob("*"):
            if not folder.name.isdecimal() or int(folder.name) >= before:
                continue
            stay = {str(group.number) for group in carried if group.step == int(folder.name)}
            for workdir in folder.glob("*"):
                # Includes directories that a killed process left.
                if workdir.name.partition("-")[0] not in stay:
                    make_way(workdir)
            with suppress(OSError):  # not empty
                folder.rmdir()


@dataclass(frozen=True, slots=True)
class ScenarioTasks:
    folder: ScenarioFolder
    agent: Agent
    check: StandingCheck
    model: str
    seed: int
    groups: int
    """Groups per step, over all ranks."""
    workdirs: Workdirs
    manager: SessionManager
    value_forks: int = 0
    """Forks of each trained turn but the first, whose state the whole group shares."""

    def task_of(self, index: RolloutIndex) -> AgentTask:
        scenario, prompt = self.folder.scenario, self._prompt_of(index.group)
        return AgentTask(
            agent=self.agent,
            prompt=self.folder.text_of(prompt),
            workdir=self.workdirs.of(index),
            model=self.model,
            deadline_s=scenario.agent.deadline_s,
            session=scenario.session(index.seed(self.seed)),
            request_kwargs=scenario.agent.request_kwargs,
            metadata={**prompt.metadata, GROUP_SEED: self._group_seed(index.group)},
        )

    async def reward(self, index: RolloutIndex, rollout: Rollout) -> RolloutReward | None:
        """Score `rollout`. Raises `ScenarioError` without a finite reward."""
        prompt = self._prompt_of(index.group)
        metadata: Json = prompt.metadata | prompt.check_metadata | {GROUP_SEED: self._group_seed(index.group)}
        score = await self.check.score(rollout.session, rollout.agent_result, metadata)
        if score.error is not None:
            raise ScenarioError(score.error)
        if score.reward is None:
            return None
        return RolloutReward(score.reward, score.turn_rewards, score.figures, score.reason)

    async def valued_reward(self, index: RolloutIndex, rollout: Rollout) -> RolloutReward | None:
        """Score and fork `rollout`, for values of its turns. Raises `ScenarioError` if no fork of one has a reward."""
        scored = await self.reward(index, rollout)
        if scored is None or not self.value_forks or rollout.session_id is None:
            return scored
        task, values = self.task_of(index), {}
        form = normal_form(task.session_fields.get("matching", ()))
        for turn in list(values_of(rollout.samples))[1:]:
            here = replace(task, workdir=task.workdir / f"turn-{turn}")
            forks = await self.manager.fork(rollout.session_id, here, turn=turn, count=self.value_forks)
            # A fork that left the record earlier says nothing about this turn.
            came = [
                each
                for each in forks
                if each.outcome.kind in ENDED_WELL and not find_drift(rollout.session, turn, each.session, form=form)
            ]
            scores = [await self.reward(index, fork) for fork in came]
            value = value_of([score.reward for score in scores if score is not None])
            if value is None:
                raise ScenarioError(f"turn {turn}: expected a fork with a reward, got none: {forks[0].outcome.detail}")
            values[turn] = value
        return scored._replace(values=values)

    def _prompt_of(self, group: GroupIndex) -> Prompt:
        return self.folder.prompts.read(group.step * self.groups + group.number)

    def _group_seed(self, group: GroupIndex) -> int:
        return derive_seed(self.seed, group.step, group.number)
