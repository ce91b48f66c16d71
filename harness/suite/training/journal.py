"""A step becomes durable, in an order in which a run may be killed anywhere.

    planned     before its first rollout begins
    collected   once all is known of it: its rollouts are its own, its books balance
    the update  of the weights, in memory
    state       of the learner, on disk
    lines       in steps.jsonl and telemetry.jsonl
    committed   from here on the step has happened

A process that dies before the commit leaves a step that has not happened: its state and its lines are removed, and it
is collected anew. Rollouts of it that had ended are kept and not played again, for the same policy had sampled them.
"""

import asyncio

import msgspec

from harness.collector.record.step_ledger import book_step
from harness.collector.record.step_record import StepRecord
from harness.collector.record.step_table import StepTable
from harness.collector.record.step_telemetry import step_telemetry
from harness.collector.step_result import PackedStep, TrainedStep
from harness.learner.learner import Learner
from harness.machine.deadlines import to_the_end
from harness.rollouts.seeds import derive_seed
from harness.suite.record.rundir import RunDirectory
from harness.suite.training.checkpoints import Checkpoints
from harness.suite.training.report import TELEMETRY_FILE
from harness.suite.training.step_file import StepFile


class TrainingJournal:
    """A `StepJournal` of the run in `directory`, with training seed `seed`. All methods raise `StoreError`.

    `is_guarded`: every engine has proved that it runs the repeat guard.
    """

    def __init__(
        self,
        directory: RunDirectory,
        table: StepTable,
        checkpoints: Checkpoints,
        *,
        seed: int,
        packing_length: int,
        is_guarded: bool,
    ) -> None:
        self.directory = directory
        self._table = table
        self._checkpoints = checkpoints
        self._seed = seed
        self._packing_length = packing_length
        self._is_guarded = is_guarded
        self._steps = StepFile(directory.path / "steps.jsonl")
        self._telemetry = StepFile(directory.path / TELEMETRY_FILE)
        self._record: StepRecord | None = None

    def restore(self, learner: Learner) -> None:
        """Undo what was not committed, and bring `learner` to where the run goes on from. Blocks.

        Raises `RunError` or `LearnerError` when its state is gone or damaged.
        """
        steps = self._table.position.step
        self._steps.cut(steps)
        self._telemetry.cut(steps)
        self._checkpoints.restore(learner, steps)

    async def planned(self, step: int) -> None:
        """See `StepJournal`."""
        await asyncio.to_thread(self._table.plan, step)

    async def packed(self, step: PackedStep) -> None:
        """See `StepJournal`. Raises `LedgerImbalance`."""
        seed_base = derive_seed(self._seed, step.collected.step)
        record = StepRecord.of(step, seed_base, book_step(step))
        self._record = await asyncio.to_thread(self._table.collect, record)

    async def commit(self, trained: TrainedStep, learner: Learner) -> dict[str, float]:
        """The step that `learner` has just finished has happened when this returns its figures, or is cancelled."""
        record = self._record
        assert record is not None, "a step is collected before it is committed"

        def commit() -> dict[str, float]:
            figures = step_telemetry(trained, record, packing_length=self._packing_length, is_guarded=self._is_guarded)
            self._checkpoints.save_state(learner)
            self._steps.append(record.to_line())
            self._telemetry.append(msgspec.json.encode(figures))
            self._table.commit(record.step)
            self._checkpoints.remove_states(but=learner.step)
            return figures

        return await to_the_end(asyncio.to_thread(commit))  # its thread goes on, and the locks of the run must last
