"""The figures of a run in a store of metrics: read back with the store's own library, and equal to the report."""

import os
import re
import struct
import sys
from pathlib import Path
from typing import get_args

import pytest

from harness.cli.look.report import Format, report
from harness.errors import RunError
from harness.suite.record.rundir import RunDirectory
from harness.viewer.exports.export import ExportFormat
from harness.viewer.exports.metrics import METRICS, STATISTICS
from harness.viewer.report import make_report
from tests.harness_command import harness
from tests.recorded_runs import write_run
from tests.wandb_file import wandb_values

DOCS = Path(__file__).parents[3] / "docs" / "looking.md"
STEPS = b'{"train/loss": 2.5, "rollout/reward_mean": 0.25}\n{"train/loss": 1.5, "rollout/reward_mean": 0.5}\n'


@pytest.fixture(name="run")
async def _run(tmp_path: Path) -> RunDirectory:
    """Three rollouts, and the figures of two training steps."""
    run = await write_run(tmp_path / "run", [("Two.", 0.5), ("Two and more.", float("nan")), ("Two.", None)])
    (run.path / "telemetry.jsonl").write_bytes(STEPS)
    run.write_json(run.result, run.read_result() | {"telemetry": {"rollout/staleness": 2, "said": "no number"}})
    return run


def _expected(run: RunDirectory) -> dict[str, list[tuple[int, float]]]:
    """The values of the run's report by key: step and value."""
    values: dict[str, list[tuple[int, float]]] = {}
    for point in make_report(run.path).points:
        for key, value in point.figures.items():
            values.setdefault(key, []).append((point.step, value))
    return values


def test_the_points_of_a_report_are_its_figures(run: RunDirectory):
    """Of the run, of each session by its number, and of each training step; what is no number is in none."""
    values = _expected(run)

    assert values["session/reward"] == [(0, 0.5)]
    assert values["session/turns"] == [(0, 2), (1, 2), (2, 2)]
    assert values["train/loss"] == [(0, 2.5), (1, 1.5)]
    assert values["report/turn_end/model"] == [(0, 6)]
    assert values["rollout/staleness"] == [(0, 2)]
    assert values["report/engine_seconds/count"] == values["report/turn_seconds/count"] == [(0, 6)]
    assert "said" not in values
    assert make_report(run.path).missing == []


def test_every_key_is_in_the_table_of_the_docs(run: RunDirectory):
    """The table is the one in force, and no key is beside it."""
    rows = re.findall(r"^- `((?:report|session)/[^`]+)`: (.+)$", DOCS.read_text("utf-8"), flags=re.MULTILINE)
    assert dict(rows) == dict(METRICS)
    assert ", ".join(f"`{each}`" for each in STATISTICS) in DOCS.read_text("utf-8")
    patterns = [re.sub("[A-Z]+", "[^/]+", key) for key in METRICS]
    keys = set(_expected(run)) - {"rollout/staleness", "train/loss", "rollout/reward_mean"}
    assert [key for key in sorted(keys) if not any(re.fullmatch(each, key) for each in patterns)] == []


@pytest.mark.xdist_group("torch")  # TensorBoard imports it where it is installed
def test_tensorboard_reads_the_figures_of_the_report(run: RunDirectory, tmp_path: Path):
    """Every value under its key and step, to the float32 that an event has, and the same bytes every time."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "events"
    report(run.path, out=out, kind="tensorboard")
    read = EventAccumulator(str(out))
    read.Reload()
    found = {key: [(event.step, event.value) for event in read.Scalars(key)] for key in read.Tags()["scalars"]}

    assert found == {
        key: [(step, struct.unpack("f", struct.pack("f", value))[0]) for step, value in values]
        for key, values in _expected(run).items()
    }
    report(run.path, out=tmp_path / "again", kind="tensorboard")
    assert [path.read_bytes() for path in out.iterdir()] == [
        path.read_bytes() for path in (tmp_path / "again").iterdir()
    ]


@pytest.mark.xdist_group("command")
def test_wandb_reads_the_figures_of_the_report(run: RunDirectory, tmp_path: Path):
    """Off line, without a login, whatever the environment says; nothing but the run is in the folder."""
    out = tmp_path / "offline"
    env = {**os.environ, "WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": str(tmp_path / "home")}
    ended = harness("report", str(run.path), "--out", str(out), "--format", "wandb", env=env)
    assert ended.code == 0, ended.stderr
    [file] = out.rglob("*.wandb")

    assert {path.name for path in out.rglob("*") if path.is_file()} == {file.name}
    assert not any(path.is_symlink() for path in out.rglob("*"))
    found: dict[str, list[tuple[int, float]]] = {}
    for values in wandb_values(file.read_bytes()):
        step = int(values.pop("session_step", values.pop("training_step", 0)))
        for key, value in values.items():
            found.setdefault(key, []).append((step, value))
    assert found == _expected(run)


@pytest.mark.parametrize("kind", get_args(Format))
def test_nothing_is_overwritten_and_nothing_is_left_behind(run: RunDirectory, tmp_path: Path, kind: Format):
    """A folder with something in it, a file, a path that is no run."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").touch()
    for out in (tmp_path / "taken", run.config, tmp_path / "nowhere" / "events"):
        with pytest.raises(RunError, match="expected a"):
            report(run.path, out=out, kind=kind)
    with pytest.raises(RunError, match="expected a run directory"):
        report(tmp_path / "nothing", out=tmp_path / "events", kind=kind)
    with pytest.raises(RunError, match="without --format"):
        report(run.path, out=tmp_path / "events", plots=True, kind=kind)
    assert [path.name for path in tmp_path.iterdir() if "export" in path.name or path.name == "events"] == []


def test_a_package_that_is_missing_is_named(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    for kind in ("tensorboard", "wandb"):
        with pytest.raises(RunError, match=rf"session-harness\[{kind}\]"):
            report(run.path, out=tmp_path / "events", kind=kind)
    assert not (tmp_path / "events").exists()


def test_the_command_line_offers_every_format():
    """Its list is a copy, because the other one takes NumPy to import."""
    assert list(get_args(Format)) == list(map(str, ExportFormat))
