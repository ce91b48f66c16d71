"""What a training run writes of a step, and that nobody is left who writes it when the run has ended."""

import asyncio
import threading
from pathlib import Path

import pytest

from harness.suite.record.rundir import RunDirectory
from harness.suite.training.journal import Checkpoints, TrainingJournal
from harness.training.collector.step_outcome import StepTimes, TrainedStep
from harness.training.learner.learner import LossSums, ScriptedLearner, StepReport
from tests.unit.collector.test_step_table import new_run, usual

PATIENCE_S = 30


class SlowLearner(ScriptedLearner):
    """Its state takes as long to write as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = threading.Event()
        self.goes_on = threading.Event()

    def save_state(self, folder: Path) -> None:
        self.writes.set()
        assert self.goes_on.wait(PATIENCE_S)
        super().save_state(folder)


async def test_a_commit_that_is_cancelled_is_over_when_the_run_ends(tmp_path: Path):
    """Its thread cannot be ended, and the next process must not find it at work: the step has happened by then."""
    run, learner = await new_run(tmp_path), SlowLearner()
    directory = RunDirectory(tmp_path)
    learner.finish_step(1.0)
    with run.table() as table:
        journal = TrainingJournal(
            directory, table, Checkpoints(directory, 0), seed=1, packing_length=48, is_guarded=False
        )
        step = usual(0).packed
        await journal.planned(0)
        await journal.packed(step)
        report = StepReport(1, 1, LossSums(), 1.0, 0.0, 0.0)
        committing = asyncio.create_task(journal.commit(TrainedStep(step, report, StepTimes(1, 1, 0, 0, 0)), learner))
        assert await asyncio.to_thread(learner.writes.wait, PATIENCE_S)
        committing.cancel()
        asyncio.get_running_loop().call_later(0.2, learner.goes_on.set)
        with pytest.raises(asyncio.CancelledError):
            await committing
        committed = table.position.step
        learner.goes_on.set()

    assert committed == 1
    assert len((tmp_path / "steps.jsonl").read_bytes().splitlines()) == 1
