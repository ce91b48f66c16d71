"""Plan the rollouts of scenarios from them and seeds alone (I10), and open their agents.

A `number` is the same in every resume.
"""

import sys
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from harness.rollouts.agents.programs import prepare_agent
from harness.rollouts.agents.task import Agent, AgentTask
from harness.rollouts.sandboxes.sandbox import NONE
from harness.rollouts.seeds import derive_seed
from harness.suite.scenarios.folder import ScenarioFolder
from harness.suite.scenarios.scenario import Prompt
from harness.types import Json


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    number: int
    """Position in the run, from 0; `index` of its samples."""
    group: int
    """Prompt's position in the run; `group_index` of the samples."""
    folder: ScenarioFolder
    position: int
    """Prompt's position in the scenario."""
    seed: int

    def read_prompt(self) -> Prompt:
        """Read the prompt, perhaps from a disk. Raises `ScenarioError`."""
        return self.folder.prompts.read(self.position)

    def task(self, agent: Agent, prompt: Prompt, workdir: Path, model: str) -> AgentTask:
        """Return the task of `agent` with `prompt`, which `read_prompt` has read. Raises `ScenarioError`."""
        spec = self.folder.scenario.agent
        return AgentTask(
            agent=agent,
            prompt=self.folder.text_of(prompt),
            workdir=workdir,
            model=model,
            deadline_s=spec.deadline_s,
            session=self.session,
            request_kwargs=spec.request_kwargs,
            metadata=prompt.metadata,
        )

    @property
    def session(self) -> Json:
        """Body of `POST /sessions`."""
        scenario = self.folder.scenario
        script = {"script": self.folder.session_script()} if scenario.forces_tokens else {}
        return {
            **script,
            "metadata": {"scenario": scenario.name, "rollout": self.number},
            **scenario.session(self.seed),
        }


@dataclass(frozen=True, slots=True)
class ScenarioPlan:
    """Rollouts of a scenario, made on demand. Groups are contiguous."""

    folder: ScenarioFolder
    first: int
    """Number of the scenario's first rollout."""
    first_group: int
    numbers: Sequence[int]
    """Numbers of the rollouts, all or some of the scenario's."""

    def keep(self, wanted: Callable[[int], bool]) -> Self:
        return replace(self, numbers=array("q", filter(wanted, self.numbers)))

    def find(self, number: int) -> PlannedRollout:
        scenario = self.folder.scenario
        position, sample = divmod(number - self.first, scenario.samples_per_prompt)
        seed = derive_seed(scenario.seed, position, sample)
        return PlannedRollout(number, self.first_group + position, self.folder, position, seed)

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[PlannedRollout]:
        return map(self.find, self.numbers)


def plan_rollouts(folders: Sequence[ScenarioFolder]) -> list[ScenarioPlan]:
    plans: list[ScenarioPlan] = []
    first = group = 0
    for folder in folders:
        plans.append(ScenarioPlan(folder, first, group, range(first, first + folder.session_count)))
        first, group = first + folder.session_count, group + len(folder.prompts)
    return plans


@asynccontextmanager
async def open_agent(folder: ScenarioFolder) -> AsyncIterator[Agent]:
    """Yield the agent of `folder`. Raises `AgentError` (environment) or `ScenarioError` (function)."""
    if folder.agent_function is not None:
        # Standard output belongs to the result of the command. Programs print into the log of their rollout.
        with redirect_stdout(sys.stderr):
            yield folder.agent_function.load()
        return
    spec = folder.scenario.agent
    games = {"HARNESS_GAME": folder.file(spec.game)} if spec.game else {}
    program = await prepare_agent(folder.agent_command or folder.agent_script, name=folder.name)
    yield replace(
        program,
        env={**program.env, **{name: str(game) for name, game in games.items()}, **spec.env},
        setup=tuple(spec.setup) or program.setup,
        cwd=spec.cwd or program.cwd,
        files={**program.files, **folder.agent_files},
        folders=(*program.folders, *games.values()),
        sandbox=program.sandbox if spec.sandbox.kind == NONE else spec.sandbox,
    )
