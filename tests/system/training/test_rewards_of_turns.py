"""What a check says of turns and in words, through the commands: into samples and packs."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.samples.codec import read_samples
from harness.suite.exits import ExitCode
from harness.training.collector.record.step_record import pack_again
from harness.training.collector.record.step_table import read_step
from harness.training.collector.segment_maker import SegmentMaker
from tests.harness_command import harness
from tests.trained_scenario import write_trained_scenario

CHECK = """
def score(session, result, metadata):
    return {{"reward": {reward}, "turn_rewards": {rewards}, "score": {{"steps": 2}}, "reason": "2 of 3 steps"}}
"""
SCORE = {"figures": {"steps": 2.0}, "reason": "2 of 3 steps"}
BY_TURN = CHECK.format(reward="0.75 + len(session['turns']) / 100", rewards="{0: 0.25, 1: 0.5}")


def _scenario(directory: Path, check: str, **train: Any) -> Path:
    folder = write_trained_scenario(directory, train=train)
    (folder / "check.py").write_text(check)
    return folder


def test_samples_of_a_run_have_them(tmp_path: Path):
    """Beside the reward, which stays what it is; what no turn earned was earned at the end."""
    run = tmp_path / "run"
    ended = harness("run", _scenario(tmp_path / "s", BY_TURN), "--out", run)
    assert ended.code == ExitCode.PASSED, ended.stderr
    samples = read_samples(run / "samples.jsonl")
    assert {each.turn_rewards for each in samples} == {(0.25, 0.5), (0.25, 0.5, None)}
    assert [each.metadata["score"] for each in samples] == [SCORE] * len(samples)
    for each in samples:
        firsts = [each.returns[start] for start, _ in each.metadata["spans"]]
        total = 0.75 + len(firsts) / 100
        assert each.reward == total
        assert firsts == pytest.approx([total, total - 0.25, total - 0.75][: len(firsts)], abs=1e-6)


def test_a_turn_that_is_not_there_costs_a_session_its_reward(tmp_path: Path):
    run = tmp_path / "run"
    ended = harness("run", _scenario(tmp_path / "s", CHECK.format(reward=1, rewards="{2: 1.0}")), "--out", run)
    assert ended.code == ExitCode.CHECKS_FAILED, ended.stderr
    result = (run / "result.json").read_text()
    assert "turn_rewards['2']: expected the index of a turn, 0 to 1, or the id of one of its tool calls" in result


@pytest.mark.parametrize("estimator", ["turn", "return_to_go"])
def test_a_training_run_uses_each_estimator(tmp_path: Path, estimator: str):
    """Its step can be packed again, advantage for advantage."""
    check = CHECK.format(reward="metadata['group_seed'] % 3", rewards="{0: result['turns'] / 8}")
    run = tmp_path / "run"
    ended = harness("train", _scenario(tmp_path / "s", check, advantage=estimator), "--steps", "2", "--out", run)
    assert ended.code == ExitCode.PASSED, ended.stderr
    record, rollouts = read_step(run / "run.db", 1)
    packs = pack_again(record, rollouts, SegmentMaker(128))
    assert [pack.digest() for pack in packs] == [each.digest for each in record.packs]
    assert {len(each.rollout.samples[0].turn_rewards) for each in rollouts} <= {2, 3}
    assert all(each.metadata["score"] == SCORE for rollout in rollouts for each in rollout.rollout.samples)
    advantages = [segment.advantage for pack in record.packs for segment in pack.segments]
    assert all(isinstance(each, tuple) for each in advantages)
    ledger = json.loads((run / "result.json").read_text())["ledger"]
    assert ledger["difference"] == 0
