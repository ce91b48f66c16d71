"""What of a learner is on disk, so that a run killed at any moment goes on with each trained token in one step.

The order of a step's end, from n steps to n + 1:

    state/<n+1>         all that the learner goes on from, written whole
    the step commits    in run.db; from here on it has happened
    state/<n>           goes
    checkpoints/<n+1>   the weights, for the engines
    checkpoints/<n>     goes, unless it is one that stays

Killed before the commit, the run goes on from state n, and the step is collected anew, with the rollouts of it that
had ended: these are kept and not played again. Killed after it, the run goes on from state n + 1, and brings its
weights to the engines first. Model folders depend on states and on nothing else, so those of a killed run are made
again.
"""

import shutil
from pathlib import Path

from harness.errors import RunError
from harness.learner.learner import Learner
from harness.suite.record.rundir import RunDirectory


class Checkpoints:
    """The states and model folders in the directory of a run. Its methods block, and raise `LearnerError`."""

    def __init__(self, directory: RunDirectory, every: int) -> None:
        """After each `every` steps the model folder stays; 0 keeps the last one only."""
        self._states = directory.path / "state"
        self._models = directory.checkpoints
        self._every = every

    def restore(self, learner: Learner, steps: int) -> None:
        """`learner` as it was after `steps` committed steps.

        Raises `RunError` when its state is not there.
        """
        if not steps:
            return
        folder = self._states / str(steps)
        if not folder.is_dir():
            raise RunError(f"{folder} is gone, so the run cannot go on after step {steps}; start a new run")
        learner.load_state(folder)

    def save_state(self, learner: Learner) -> None:
        """Write the state of `learner` after the step that is about to be committed."""
        folder = self._states / str(learner.step)
        shutil.rmtree(folder, ignore_errors=True)  # of a step that a killed run had not committed
        learner.save_state(folder)

    def save_model(self, learner: Learner) -> Path:
        """The folder with the weights of `learner`, made now; absolute."""
        folder = self._models.resolve() / str(learner.step)
        shutil.rmtree(folder, ignore_errors=True)
        learner.save(folder)
        return folder

    def remove_states(self, *, but: int) -> None:
        """Remove every state but the one after `but` steps."""
        _remove(self._states, {but})

    def remove_models(self, *, but: int) -> None:
        """Remove the model folders that no engine serves any more, but those that stay."""
        stay = range(self._every, but, self._every) if self._every else ()
        _remove(self._models, {but, *stay})


def _remove(parent: Path, keep: set[int]) -> None:
    for folder in parent.glob("*"):
        if not folder.name.isdecimal() or int(folder.name) not in keep:
            shutil.rmtree(folder, ignore_errors=True)
