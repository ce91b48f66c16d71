"""`harness run weight_updates`, and every logprob of its samples against the checkpoints it made.

Its model is that of the tests, which ends few sentences; they end at lines, too.
"""

import json
from pathlib import Path

import pytest

from tests.ground_truth import compare
from tests.installed_harness import RunShipped

pytestmark = [pytest.mark.model, pytest.mark.agent, pytest.mark.timeout(1860)]


def test_the_samples_of_a_run_are_true_about_every_checkpoint(tmp_path: Path, model_dir: Path, run_shipped: RunShipped):
    """Four policies sampled; all checks of the scenario hold, its updates had no problem, and no value is off."""
    run = tmp_path / "run"
    shorter = ("agent.request_kwargs.stop=['.', \"\\n\"]", "checks.min_proximal_tokens=20")
    options = (option for each in shorter for option in ("--set", each))
    ended = run_shipped("weight_updates", run, "--model", model_dir, *options)
    assert ended.code == 0, ended.stdout + ended.stderr
    updates = json.loads((run / "weights.json").read_text())["updates"]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]

    assert json.loads((run / "result.json").read_text())["witness"]["agrees"] is True

    verdict = compare(samples, {0: model_dir} | {number: run / "checkpoints" / str(number) for number in (1, 2, 3)})

    assert [update["problems"] for update in updates] == [[], [], []]
    assert verdict.third_states == []
    assert verdict.behavior_difference < 1e-3
    assert verdict.proximal_difference < 1e-3
    assert verdict.met_next >= 20
    assert verdict.moved > 0.01
