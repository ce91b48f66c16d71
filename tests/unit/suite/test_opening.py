"""Which directory a run comes to."""

from pathlib import Path

import pytest

from harness.errors import RunError
from harness.suite.record.config import Overrides
from harness.suite.run.open_run import begin_run, resume_run
from tests.harness_command import write_scenario


def test_a_suite_whose_name_begins_another_name_finds_its_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`abort` goes on with a run of `abort`, also when one of `abort-often` is newer."""
    monkeypatch.chdir(tmp_path)
    suite, other = (str(write_scenario(tmp_path / name)) for name in ("abort", "abort-often"))
    mine = begin_run(suite, Overrides(), None).directory.path
    begin_run(other, Overrides(), None)
    second = begin_run(suite, Overrides(), None).directory.path

    assert resume_run(suite, Overrides(), None).directory.path == second != mine


def test_a_suite_without_a_run_of_its_own_has_none_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs of longer names are not looked at."""
    monkeypatch.chdir(tmp_path)
    begin_run(str(write_scenario(tmp_path / "abort-often")), Overrides(), None)

    with pytest.raises(RunError, match=r"no unfinished run of '.*abort' in runs/"):
        resume_run(str(write_scenario(tmp_path / "abort")), Overrides(), None)
