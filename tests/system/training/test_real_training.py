"""The real parts together: the local engine as a process of its own, the torch learner, weights that travel."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from harness.suite.exits import ExitCode
from tests.harness_command import harness
from tests.trained_scenario import write_real_scenario


def test_three_steps_change_the_weights_of_the_engine(tmp_path: Path):
    """Nothing is lost, the first step is on policy to 1e-4, weights change under live sessions and stay as asked.

    Tokens are drawn with top-p, and trained over their recorded candidates.
    """
    scenario, run = write_real_scenario(tmp_path / "s"), tmp_path / "run"
    text = (scenario / "scenario.toml").read_text()
    (scenario / "scenario.toml").write_text(f'record = ["sampling_mask"]\n{text}\n[sampling]\ntop_p = 0.9\n')
    ended = harness("train", scenario, "--steps", "3", "--out", run, "--json", timeout_s=300)
    assert ended.code == ExitCode.PASSED, ended.stderr
    assert ended.document["ledger"]["difference"] == 0
    steps = [json.loads(line) for line in (run / "telemetry.jsonl").read_text().splitlines()]
    updates = [json.loads(line) for line in (run / "weights.jsonl").read_text().splitlines()]
    assert [each["stage2/raw_rollouts"] for each in steps] == [4, 4, 4]
    assert abs(steps[0]["train/ratio_mean"] - 1) < 1e-4
    assert abs(steps[0]["train/kl"]) < 1e-6
    assert [each["weights/version"] for each in updates] == [1, 2, 3]
    assert [each["weights/problems"] for each in updates] == [0, 0, 0]
    assert all(each["weights/live_sessions"] > 0 for each in updates[:-1])  # after the last one nothing is begun
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["2", "3"]
    before = load_file(tmp_path / "weights" / "model.safetensors")
    after = load_file(run / "checkpoints" / "3" / "model.safetensors")
    assert any(not np.array_equal(before[name], after[name]) for name in before)
