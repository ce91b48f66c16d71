"""Tasks and rewards of a scenario's rollouts, by index. They depend on index and run seed alone (I10).

Groups take the prompts in turn. The metadata `group_seed`, equal within a group, lets scenarios generate tasks.
"""

from dataclasses import dataclass

from harness.errors import ScenarioError
from harness.rollouts.agents.task import Agent, AgentTask
from harness.rollouts.seeds import derive_seed
from harness.samples.rollout import Rollout
from harness.samples.turn_rewards import RolloutReward
from harness.suite.judge.reward import StandingCheck
from harness.suite.scenarios.folder import ScenarioFolder
from harness.suite.scenarios.scenario import Prompt
from harness.suite.training.workdirs import Workdirs
from harness.training.collector.groups import GroupIndex, RolloutIndex
from harness.types import Json

GROUP_SEED = "group_seed"


@dataclass(frozen=True, slots=True)
class ScenarioTasks:
    """Tasks of a scenario and their rewards."""

    folder: ScenarioFolder
    agent: Agent
    check: StandingCheck
    model: str
    seed: int
    groups: int
    """Groups per step, over all ranks."""
    workdirs: Workdirs

    def task_of(self, index: RolloutIndex) -> AgentTask:
        scenario, prompt = self.folder.scenario, self._prompt_of(index.group)
        spec = scenario.agent
        limits = scenario.limits.model_dump(exclude_none=True)
        sampling = {**scenario.sampling.model_dump(exclude_none=True), "seed": index.seed(self.seed)}
        return AgentTask(
            agent=self.agent,
            prompt=self.folder.text_of(prompt),
            workdir=self.workdirs.of(index),
            model=self.model,
            deadline_s=spec.deadline_s,
            session={
                "limits": limits,
                "sampling": sampling,
                "after_incomplete": scenario.after_incomplete,
                **scenario.variables,
            },
            request_kwargs=spec.request_kwargs,
            metadata={**prompt.metadata, GROUP_SEED: self._group_seed(index.group)},
        )

    async def reward(self, index: RolloutIndex, rollout: Rollout) -> RolloutReward | None:
        """Score `rollout`. Raises `ScenarioError` without a finite reward."""
        prompt = self._prompt_of(index.group)
        metadata: Json = prompt.metadata | prompt.check_metadata | {GROUP_SEED: self._group_seed(index.group)}
        score = await self.check.score(rollout.session, rollout.agent_result, metadata)
        if score.error is not None:
            raise ScenarioError(score.error)
        return None if score.reward is None else RolloutReward(score.reward, score.turn_rewards)

    def _prompt_of(self, group: GroupIndex) -> Prompt:
        return self.folder.prompts.read(group.step * self.groups + group.number)

    def _group_seed(self, group: GroupIndex) -> int:
        return derive_seed(self.seed, group.step, group.number)
