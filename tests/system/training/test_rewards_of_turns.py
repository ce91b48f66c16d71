"""What a check says of turns and in words, through the commands: into samples and packs."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from harness.errors import StepError
from harness.samples.codec import read_samples
from harness.suite.exits import ExitCode
from harness.training.collector.record.step_record import pack_again
from harness.training.collector.record.step_table import read_step
from harness.training.collector.segment_maker import SegmentMaker
from tests.harness_command import harness
from tests.trained_scenario import write_real_scenario, write_trained_scenario

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


def test_a_training_run_has_its_teachers(tmp_path: Path):
    """Each trained token has a score, the step's figures the gap, and a step can be packed again."""
    folder = _scenario(tmp_path / "s", CHECK.format(reward=0, rewards={}), advantage="reward", teachers={"rule": 0.5})
    file = folder / "scenario.toml"
    file.write_text(file.read_text() + '\n[teachers.rule]\nengine = "scripted"\n')
    run = tmp_path / "run"
    ended = harness("train", folder, "--steps", "2", "--out", run)
    assert ended.code == ExitCode.PASSED, ended.stderr
    record, rollouts = read_step(run / "run.db", 1)
    for rollout in rollouts:
        for sample in rollout.rollout.samples:
            assert not np.isnan(sample.teachers["rule"][sample.loss_mask == 1]).any()
    packs = pack_again(record, rollouts, SegmentMaker(128, teachers={"rule": 0.5}))
    assert [pack.digest() for pack in packs] == [pack.digest for pack in record.packs]
    with pytest.raises(StepError, match="comes out with the digest"):
        pack_again(record, rollouts, SegmentMaker(128))
    figures = [json.loads(line) for line in (run / "telemetry.jsonl").read_text().splitlines()]
    # The scripted teacher has version 0, as the policy of the first step: their logprobs are equal.
    assert figures[0]["rollout/teacher_gap/rule"] == 0.0
    assert figures[1]["rollout/teacher_gap/rule"] != 0.0


def test_a_training_run_distills_the_rule_of_a_script(tmp_path: Path):
    """The scenario names the script. The divergence of a random model from it falls, without a reward."""
    folder = write_real_scenario(tmp_path / "s")
    (folder / "check.py").write_text(CHECK.format(reward=0, rewards={}))
    rule = {"after": r"<\|im_start\|>assistant\n", "say": ["!" * 8]}
    (folder / "rule.toml").write_text(tomli_w.dumps({"rule": rule}))
    file = folder / "scenario.toml"
    scenario = tomllib.loads(file.read_text())
    scenario["teachers"] = {"rule": {"engine": "scripted=rule.toml", "top_k": 5}}
    scenario["train"] |= {"teachers": {"rule": 1.0}, "optimizer": {"learning_rate": 1e-2}, "rollouts_per_step": 8}
    scenario |= {"prompts": [{"metadata": {"turns": 1}}], "limits": {"tokens_per_turn": 8}}
    file.write_text(tomli_w.dumps(scenario))
    ended = harness("train", folder, "--steps", "8", "--out", tmp_path / "run", timeout_s=300)
    assert ended.code == ExitCode.PASSED, ended.stderr
    lines = (tmp_path / "run" / "telemetry.jsonl").read_text().splitlines()
    gaps = [json.loads(line)["rollout/teacher_gap/rule"] for line in lines]
    assert gaps[-1] < gaps[0] / 2


def test_a_training_run_credits_turns_by_value(tmp_path: Path):
    """Each turn but the first is forked; what the forks sampled is in no step, and in the run's ledger."""
    check = CHECK.format(reward="len(session['turns']) / 4", rewards="{}")
    run = tmp_path / "run"
    folder = _scenario(tmp_path / "s", check, advantage="value", value_forks=2)
    ended = harness("train", folder, "--steps", "1", "--out", run)
    assert ended.code == ExitCode.PASSED, ended.stderr
    record, rollouts = read_step(run / "run.db", 0)
    for each in rollouts:
        [sample] = each.rollout.samples
        turns = len(sample.metadata["turns"])
        values = sample.metadata["turn_values"]
        assert {turn: value["mean"] for turn, value in values.items()} == {str(n): turns / 4 for n in range(1, turns)}
    advantages = [segment.advantage for pack in record.packs for segment in pack.segments]
    assert all(set(each) == {0.0} for each in advantages)
    ledger = json.loads((run / "result.json").read_text())["ledger"]
    assert (ledger["difference"], ledger["dropped"]["interrupted"] > 0) == (0, True)


def test_forks_without_their_estimator_are_refused(tmp_path: Path):
    ended = harness("train", _scenario(tmp_path / "s", BY_TURN, value_forks=2), "--steps", "1")
    assert ended.code == ExitCode.USAGE
    assert "value_forks of at least 1 with advantage" in ended.stderr
