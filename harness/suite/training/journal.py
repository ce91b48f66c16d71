"""Commit training steps so that each token is trained once, even if the run is killed. A step, in this order:

    planned             before its first rollout begins
    collected           once its rollouts are fixed and its ledger balances
    the update          of the weights, in memory
    state/<n+1>         what the learner needs to continue
    lines               in steps.jsonl and telemetry.jsonl
    committed           in run.db; now the step has happened
    state/<n>           removed
    checkpoints/<n+1>   the weights for the engines
    checkpoints/<n>     removed, unless kept

Killed before the commit, the run resumes from state n and collects the step again, with its ended rollouts, which the
same policy sampled. Killed after it, the run first publishes the weights of state n + 1.
"""

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from harness.errors import RunError
from harness.machine.deadlines import to_the_end
from harness.rollouts.seeds import derive_seed
from harness.suite.record.rundir import RunDirectory
from harness.suite.training.report import TELEMETRY_FILE, StepFile
from harness.training.collector.record.step_ledger import book_step, step_telemetry
from harness.training.collector.record.step_record import StepRecord
from harness.training.collector.record.step_table import StepTable
from harness.training.collector.step_outcome import PackedStep, TrainedStep
from harness.training.learner.learner import Learner


class Checkpoints:
    """Learner states and model folders. Methods block, and raise `LearnerError`."""

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
        _remove(self._states, {but})

    def remove_models(self, *, but: int) -> None:
        """Remove model folders neither served nor kept."""
        stay = range(self._every, but, self._every) if self._every else ()
        _remove(self._models, {but, *stay})


def _remove(parent: Path, keep: set[int]) -> None:
    for folder in parent.glob("*"):
        if not folder.name.isdecimal() or int(folder.name) not in keep:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class TrainingJournal:
    """A `StepJournal` in `directory`. Methods raise `StoreError`."""

    directory: RunDirectory
    table: StepTable
    checkpoints: Checkpoints
    seed: int
    packing_length: int
    is_guarded: bool
    """True if every engine has proved its guard."""
    _record: StepRecord | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._steps = StepFile(self.directory.path / "steps.jsonl")
        self._telemetry = StepFile(self.directory.path / TELEMETRY_FILE)

    def restore(self, learner: Learner) -> None:
        """Undo what was not committed, and load the last state. Blocks. Raises `RunError` or `LearnerError`."""
        steps = self.table.position.step
        self._steps.cut(steps)
        self._telemetry.cut(steps)
        self.checkpoints.restore(learner, steps)

    async def planned(self, step: int) -> None:
        await asyncio.to_thread(self.table.plan, step)

    async def packed(self, step: PackedStep) -> None:
        """See `StepJournal`. Raises `LedgerImbalance`."""
        seed_base = derive_seed(self.seed, step.collected.step)
        record = StepRecord.of(step, seed_base, book_step(step))
        self._record = await asyncio.to_thread(self.table.collect, record)

    async def commit(
        self, trained: TrainedStep, learner: Learner, audited: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Commit the finished step, even if cancelled. Returns its figures, with an audit's."""
        record = self._record
        assert record is not None, "a step is collected before it is committed"

        def commit() -> dict[str, float]:
            figures = step_telemetry(trained, record, packing_length=self.packing_length, is_guarded=self.is_guarded)
            figures |= audited or {}
            self.checkpoints.save_state(learner)
            self._steps.append(record.to_line())
            self._telemetry.append(msgspec.json.encode(figures))
            self.table.commit(record.step)
            self.checkpoints.remove_states(but=learner.step)
            return figures

        return await to_the_end(asyncio.to_thread(commit))  # cannot stop the thread: keep the run's locks until it ends
