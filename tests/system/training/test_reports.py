"""Figures of a training run, in stores of metrics while it continues: read back with the stores' own libraries."""

import json
import re
import sqlite3
import struct
import sys
from pathlib import Path

import pytest

from harness.errors import ScenarioError
from harness.suite.record.config import Overrides
from harness.suite.run.interrupts import Interrupts
from harness.suite.run.open_run import begin_run, resume_run
from harness.suite.training.train_run import TrainRun
from harness.training.step_stores import StepStore, report_steps
from tests.checkout import ROOT
from tests.trained_scenario import write_trained_scenario
from tests.wandb_file import wandb_values

STORES = list(StepStore)


async def test_each_step_is_in_every_store_also_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Under the keys of `telemetry.jsonl`, which the docs list, by the number of committed steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which the package reads when it is loaded
    scenario, run = str(write_trained_scenario(tmp_path / "s")), tmp_path / "run"
    opened = begin_run(scenario, Overrides(), run, trains=True)
    await TrainRun(opened, 2, lambda _: None, Interrupts(), stores=STORES).execute()
    opened = resume_run(str(run), Overrides(), None, trains=True)
    report = await TrainRun(opened, 3, lambda _: None, Interrupts(), stores=STORES).execute()

    read = EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    lines = [line for file in files for line in wandb_values(file.read_bytes()) if "train/micro_steps" in line]
    for key in report.telemetry[0]:
        expected = [line[key] for line in report.telemetry]
        single = [struct.unpack("f", struct.pack("f", value))[0] for value in expected]
        assert [(event.step, event.value) for event in read.Scalars(key)] == [*enumerate(single, 1)], key
        assert [line[key] for line in lines][: len(expected)] == expected, key
    with sqlite3.connect(tmp_path / "trackio" / "session-harness.db") as table:
        rows = table.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    assert [step for step, _ in rows] == [1, 2, 3]
    for line, (_, figures) in zip(report.telemetry, rows, strict=True):
        assert line.items() <= json.loads(figures).items()
    page = (ROOT / "docs/training.md").read_text("utf-8")
    listed = re.findall(
        r"^- (`[^:]+`): ", page.partition("### Figures of a step")[2].partition("\n### ")[0], re.MULTILINE
    )
    documented = re.findall(r"`([^`]+)`", "\n".join(listed))
    patterns = [re.sub("[A-Z]+", "[a-z0-9_]+", key) for key in documented]
    keys = read.Tags()["scalars"]
    assert [key for key in keys if not any(re.fullmatch(each, key) for each in patterns)] == []


def test_a_figure_that_is_no_number_is_left_out(tmp_path: Path):
    """The other figures of the step are reported, and an adapter's own program may do that without a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with report_steps([StepStore.TENSORBOARD], tmp_path) as report:
        report(1, {"train/loss": float("nan"), "rollout/reward_mean": 0.5})
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert read.Tags()["scalars"] == ["rollout/reward_mean"]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before anything is trained."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ScenarioError, match=r"session-harness\[wandb\]"), report_steps(STORES, tmp_path):
        pass
