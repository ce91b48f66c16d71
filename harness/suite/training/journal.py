"""Commit training steps so that the run may be killed at any point.

    planned     before the first rollout begins
    collected   once its rollouts are fixed and its ledger balances
    the update  of the weights, in memory
    state       of the learner, on disk
    lines       in steps.jsonl and telemetry.jsonl
    committed   now the step has happened

After a crash before the commit, state and lines are removed and the step is collected again. Its ended rollouts stay,
because the same policy sampled them.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from harness.machine.deadlines import to_the_end
from harness.rollouts.seeds import derive_seed
from harness.suite.record.rundir import RunDirectory
from harness.suite.training.checkpoints import Checkpoints
from harness.suite.training.report import TELEMETRY_FILE
from harness.suite.training.step_file import StepFile
from harness.training.collector.record.step_ledger import book_step, step_telemetry
from harness.training.collector.record.step_record import StepRecord
from harness.training.collector.record.step_table import StepTable
from harness.training.collector.step_outcome import PackedStep, TrainedStep
from harness.training.learner.learner import Learner


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
        """Commit the finished step, even if cancelled. Returns its figures, with those of an audit."""
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
