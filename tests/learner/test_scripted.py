"""The scripted learner keeps the protocol: one change per step, nothing of a step that failed, state that continues."""

from pathlib import Path

import pytest

from harness.errors import LearnerError
from harness.training import Learner, Pack, ScriptedLearner, Segment, StepReport


def pack(*lengths: int) -> Pack:
    """Segments of these lengths; all tokens but the first are trained."""
    segments = [
        Segment(range(n), [0] + [1] * (n - 1), *[[0.0] * n] * 3, [-1] + [0] * (n - 1), [-1] + [0] * (n - 1))
        for n in lengths
    ]
    return Pack.of(segments, range(len(segments)))


def train(learner: Learner, *packs: Pack) -> StepReport:
    """One step."""
    return learner.finish_step(sum(learner.accumulate(each).trained_tokens for each in packs))


def test_equal_weights_mean_equal_packs_in_equal_steps() -> None:
    """Order, steps and what is in them all count."""

    def weights_after(*steps: list[Pack]) -> str:
        learner = ScriptedLearner()
        for step in steps:
            train(learner, *step)
        return learner.weights

    assert weights_after([pack(3), pack(4)]) == weights_after([pack(3), pack(4)])
    others = ([pack(4), pack(3)],), ([pack(3)], [pack(4)]), ([pack(3, 4)],)
    assert len({weights_after(*steps) for steps in others} | {weights_after([pack(3), pack(4)])}) == 4


def test_a_step_is_reported_with_its_sums() -> None:
    """Over its packs."""
    report = train(ScriptedLearner(), pack(3, 5), pack(4))
    assert (report.step, report.packs, report.sums.trained_tokens, report.normalizer) == (1, 2, 9.0, 9.0)
    assert report.telemetry()["train/trained_tokens"] == 9.0


def test_a_step_without_a_trained_token_changes_nothing_and_counts() -> None:
    """Its normalizer may be 0."""
    learner = ScriptedLearner(start="first")
    assert learner.finish_step(0).step == 1
    assert learner.weights == "first"


@pytest.mark.parametrize("normalizer", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_that_fails_leaves_nothing_behind(normalizer: float) -> None:
    """Its packs are not in the next one, and it does not count."""
    learner, other = ScriptedLearner(), ScriptedLearner()
    learner.accumulate(pack(7))
    with pytest.raises(LearnerError, match="normalizer"):
        learner.finish_step(normalizer)
    learner.accumulate(pack(9))
    learner.discard_step()
    assert train(learner, pack(3)) == train(other, pack(3))
    assert learner.weights == other.weights


def test_it_goes_on_from_its_state(tmp_path: Path) -> None:
    """With the weights and the step it had; a folder that is there is not written over."""
    learner, successor = ScriptedLearner(), ScriptedLearner()
    train(learner, pack(3))
    learner.save_state(tmp_path / "state")
    successor.load_state(tmp_path / "state")
    assert train(successor, pack(4)) == train(learner, pack(4))
    assert successor.weights == learner.weights
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    with pytest.raises(LearnerError, match="exists already"):
        learner.save(tmp_path / "state")


def test_state_that_is_none_is_refused(tmp_path: Path) -> None:
    """By name, and nothing changes."""
    learner = ScriptedLearner(start="first")
    with pytest.raises(LearnerError, match="nowhere"):
        learner.load_state(tmp_path / "nowhere")
    (tmp_path / "scripted_learner.json").write_text('{"step": 4}')
    with pytest.raises(LearnerError, match="weights"):
        learner.load_state(tmp_path)
    assert (learner.step, learner.weights) == (0, "first")


def test_a_folder_that_cannot_be_written_is_not_there(tmp_path: Path) -> None:
    """A half-written one neither."""
    (tmp_path / "file").write_text("")
    with pytest.raises(LearnerError, match="cannot be written"):
        ScriptedLearner().save(tmp_path / "file" / "weights")
