"""`harness train`: steps that are committed one by one, told, ended early, killed, and gone on with."""

import json
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from harness.suite.exits import ExitCode
from tests.harness_command import Ended, harness, start_harness, wait, wait_for
from tests.trained_scenario import write_trained_scenario


@pytest.fixture(name="scenario")
def _scenario(tmp_path: Path) -> Path:
    return write_trained_scenario(tmp_path / "s")


def _train(scenario: Path, run: Path, steps: int, *more: str) -> Ended:
    return harness("train", scenario, "--steps", str(steps), "--out", run, "--json", *more)


def _weights(run: Path, steps: int) -> Any:
    """All that the scripted learner was trained on so far, as one digest."""
    return json.loads((run / "state" / str(steps) / "scripted_learner.json").read_text())


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _digests(steps: list[Any]) -> list[list[str]]:
    return [[pack["digest"] for pack in step["packs"]] for step in steps]


def test_every_step_is_committed_and_told(scenario: Path, tmp_path: Path):
    """Exit code, report, a line per step in both files, the last weights, and old steps' sessions gone."""
    run = tmp_path / "run"
    ended = _train(scenario, run, 4)
    assert ended.code == ExitCode.PASSED, ended.stderr
    assert json.loads((run / "result.json").read_text()) == ended.document
    assert ended.document["steps"] == 4
    assert ended.document["ledger"]["difference"] == 0
    assert [each["step"] for each in _lines(run / "steps.jsonl")] == [0, 1, 2, 3]
    assert [each["version"] for each in _lines(run / "steps.jsonl")] == [0, 1, 2, 3]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["4"]
    assert [path.name for path in (run / "state").iterdir()] == ["4"]
    assert ended.stderr.count("\nstep ") == 4
    assert [each["global_step"] for each in _lines(run / "telemetry.jsonl")] == [0, 1, 2, 3]
    assert [each["weights/version"] for each in _lines(run / "weights.jsonl")] == [1, 2, 3, 4]
    with sqlite3.connect(run / "run.db") as database:
        assert [step for (step,) in database.execute("SELECT step FROM steps ORDER BY step")] == [2, 3]
        assert database.execute("SELECT count(*) FROM sessions").fetchone() == (8,)


def test_a_run_goes_on_as_if_it_had_never_ended(scenario: Path, tmp_path: Path):
    """Two steps and two more train the same packs as four at once; steps that are done are not done again."""
    assert _train(scenario, tmp_path / "whole", 4).code == ExitCode.PASSED
    assert _train(scenario, tmp_path / "parts", 2).code == ExitCode.PASSED
    again = harness("train", tmp_path / "parts", "--steps", "2", "--resume", "--json")
    assert (again.code, again.document["steps"]) == (ExitCode.PASSED, 2)
    assert "starting" not in again.stderr
    more = harness("train", tmp_path / "parts", "--steps", "4", "--resume", "--json")
    assert (more.code, more.document["steps"]) == (ExitCode.PASSED, 4), more.stderr
    assert _weights(tmp_path / "parts", 4) == _weights(tmp_path / "whole", 4)
    whole, parts = (_lines(tmp_path / name / "steps.jsonl") for name in ("whole", "parts"))
    assert _digests(parts) == _digests(whole)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_stopped_goes_on(tmp_path: Path, number: signal.Signals):
    """In the second step: killed, it is collected anew; interrupted, it is committed first."""
    stopped, run = tmp_path / "stopped", tmp_path / "run"
    scenario = write_trained_scenario(tmp_path / "s", waits_for=stopped)
    process = start_harness("train", scenario, "--steps", "3", "--out", run)
    wait_for(run / "steps.jsonl", "\n")
    wait_for(run / "sessions" / "1" / "1-0-0" / "instruction.md")
    os.kill(process.pid, number)
    stopped.touch()
    ended = wait(process)
    if number == signal.SIGINT:
        assert ended.code == ExitCode.INTERRUPTED
        assert f"resume with: harness train {run} --steps 3 --resume" in ended.stderr
        assert len(_lines(run / "steps.jsonl")) == 2
    resumed = harness("train", run, "--steps", "3", "--resume", "--json")
    assert resumed.code == ExitCode.PASSED, resumed.stderr
    assert resumed.document["ledger"]["difference"] == 0
    assert _train(scenario, tmp_path / "whole", 3).code == ExitCode.PASSED
    assert _weights(run, 3) == _weights(tmp_path / "whole", 3)
    with sqlite3.connect(run / "run.db") as database:
        assert database.execute("SELECT count(*) FROM sessions WHERE closed_at IS NULL").fetchone() == (0,)


def test_a_run_that_is_another_one_is_refused(scenario: Path, tmp_path: Path):
    """A changed scenario, another seed, a command of the other kind, and a scenario that nobody can train on."""
    run = tmp_path / "run"
    assert _train(scenario, run, 1).code == ExitCode.PASSED
    other_seed = harness("train", run, "--steps", "2", "--seed", "9", "--resume")
    assert other_seed.code == ExitCode.USAGE
    assert "scenarios[0].scenario.seed: 3 -> 9" in other_seed.stderr
    played = harness("run", run, "--resume")
    assert played.code == ExitCode.USAGE
    assert "is a run of `harness train`: continue it with that command" in played.stderr
    (scenario / "play.py").write_text((scenario / "play.py").read_text() + "\n")
    changed = harness("train", run, "--steps", "2", "--resume")
    assert changed.code == ExitCode.USAGE
    assert "scenarios[0].files.play.py" in changed.stderr
    without = harness("train", "quickstart", "--steps", "1")
    assert without.code == ExitCode.USAGE
    assert "quickstart: expected one scenario that has a table [train], got quickstart" in without.stderr
