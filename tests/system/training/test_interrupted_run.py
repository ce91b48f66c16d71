"""A training run that is asked to end before it has begun a step."""

from pathlib import Path

from harness.suite.record.config import Overrides
from harness.suite.run.interrupts import Interrupts
from harness.suite.run.open_run import begin_run, resume_run
from harness.suite.training.train_run import TrainRun
from harness.training.learner.learner import Learner, ScriptedLearner
from tests.trained_scenario import write_trained_scenario


async def test_nothing_is_begun_when_the_end_was_asked_for_while_the_run_was_restored(tmp_path: Path):
    """Restoring and publishing a large model takes minutes; a whole step behind that would take more."""
    scenario, run = str(write_trained_scenario(tmp_path / "s")), tmp_path / "run"
    said: list[str] = []
    await TrainRun(begin_run(scenario, Overrides(), run, trains=True), 1, said.append, Interrupts()).execute()
    interrupts = Interrupts()

    class Slow(ScriptedLearner):
        """The user has had enough by then."""

        def load_state(self, folder: Path) -> None:
            super().load_state(folder)
            interrupts.request()

    def put_in_place(_: Learner) -> Learner:
        return Slow()

    opened = resume_run(str(run), Overrides(), None, trains=True)
    report = await TrainRun(opened, 3, said.append, interrupts, around_learner=put_in_place).execute()
    assert len(report.telemetry) == 1
    assert not report.is_complete
