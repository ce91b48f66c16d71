"""Learner states and model folders on disk: each token is trained once, even if the run is killed.

The end of a step, from n steps to n + 1, in this order:

    state/<n+1>         write what the learner needs to continue
    commit              in run.db; now the step has happened
    state/<n>           remove
    checkpoints/<n+1>   write the weights for the engines
    checkpoints/<n>     remove, unless kept

Killed before the commit, the run resumes from state n and collects the step again, reusing its ended rollouts. Killed
after it, the run resumes from state n + 1 and first publishes its weights. Model folders are rewritten from states.
"""

import shutil
from pathlib import Path

from harness.errors import RunError
from harness.suite.record.rundir import RunDirectory
from harness.training.learner.learner import Learner


class Checkpoints:
    """States and model folders. Methods block, and raise `LearnerError`."""

    def __init__(self, directory: RunDirectory, every: int) -> None:
        """Keep the model of every `every`-th step; 0 keeps only the last."""
        self._states = directory.path / "state"
        self._models = directory.checkpoints
        self._every = every

    def restore(self, learner: Learner, steps: int) -> None:
        """Load the state after `steps` steps. Raises `RunError` when it is missing."""
        if not steps:
            return
        folder = self._states / str(steps)
        if not folder.is_dir():
            raise RunError(f"{folder} is gone, so the run cannot continue after step {steps}; start a new run")
        learner.load_state(folder)

    def save_state(self, learner: Learner) -> None:
        folder = self._states / str(learner.step)
        shutil.rmtree(folder, ignore_errors=True)  # left by a run killed before its commit
        learner.save_state(folder)

    def save_model(self, learner: Learner) -> Path:
        """Write the weights. Returns the absolute folder."""
        folder = self._models.resolve() / str(learner.step)
        shutil.rmtree(folder, ignore_errors=True)
        learner.save(folder)
        return folder

    def remove_states(self, *, but: int) -> None:
        """Remove all states but that after `but` steps."""
        _remove(self._states, {but})

    def remove_models(self, *, but: int) -> None:
        """Remove model folders neither served nor kept."""
        stay = range(self._every, but, self._every) if self._every else ()
        _remove(self._models, {but, *stay})


def _remove(parent: Path, keep: set[int]) -> None:
    for folder in parent.glob("*"):
        if not folder.name.isdecimal() or int(folder.name) not in keep:
            shutil.rmtree(folder, ignore_errors=True)
