"""Plan the rollouts of scenarios, from scenarios and seeds alone (I10).

Rollout `number` is the same in every run and resume.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.rollouts.seeds import derive_seed
from harness.suite.scenarios.folder import ScenarioFolder
from harness.suite.scenarios.scenario import Prompt
from harness.types import Json


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """A session to run."""

    number: int
    """Position in the run, from 0; `index` of its samples."""
    group: int
    """Prompt's position in the run; `group_index` of the samples."""
    folder: ScenarioFolder
    prompt: Prompt
    seed: int

    @property
    def session(self) -> Json:
        """Body of `POST /sessions`."""
        scenario = self.folder.scenario
        script = {"script": self.folder.session_script()} if scenario.forces_tokens else {}
        return {
            **script,
            "metadata": {"scenario": scenario.name, "rollout": self.number},
            "limits": scenario.limits.model_dump(exclude_none=True),
            "sampling": {**scenario.sampling.model_dump(exclude_none=True), "seed": self.seed},
            "after_incomplete": scenario.after_incomplete,
            **scenario.variables,
        }


def plan_rollouts(folders: Sequence[ScenarioFolder]) -> list[PlannedRollout]:
    """Plan all rollouts, with groups contiguous."""
    planned: list[PlannedRollout] = []
    group = 0
    for folder in folders:
        scenario = folder.scenario
        for position, prompt in enumerate(scenario.prompts):
            for sample in range(scenario.samples_per_prompt):
                seed = derive_seed(scenario.seed, position, sample)
                planned.append(PlannedRollout(len(planned), group, folder, prompt, seed))
            group += 1
    return planned
