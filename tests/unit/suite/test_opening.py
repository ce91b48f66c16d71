"""Which directory a run comes to."""

from pathlib import Path

import pytest

from harness.errors import RunError
from harness.suite.record.config import Overrides
from harness.suite.run.open_run import begin_run, resume_run
from tests.harness_command import write_scenario


def test_a_suite_whose_name_begins_another_name_finds_its_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`abort` continues with a run of `abort`, also when one of `abort-often` is newer."""
    monkeypatch.chdir(tmp_path)
    suite, other = (str(write_scenario(tmp_path / name)) for name in ("abort", "abort-often"))
    mine = begin_run(suite, Overrides(), None).directory.path
    begin_run(other, Overrides(), None)
    second = begin_run(suite, Overrides(), None).directory.path

    assert resume_run(suite, Overrides(), None).directory.path == second != mine


def test_a_suite_without_a_run_of_its_own_has_none_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    begin_run(str(write_scenario(tmp_path / "abort-often")), Overrides(), None)

    with pytest.raises(RunError, match=r"no unfinished run of '.*abort' in runs/"):
        resume_run(str(write_scenario(tmp_path / "abort")), Overrides(), None)


@pytest.mark.parametrize("left", [[], ["sessions/"], ["sessions/", "config.toml"]], ids=len)
def test_a_directory_whose_making_was_killed_is_made_again(tmp_path: Path, left: list[str]):
    """There is no run in it yet, at whatever moment that was."""
    out = tmp_path / "run"
    out.mkdir()
    for name in left:
        (out / name).mkdir() if name.endswith("/") else (out / name).touch()
    suite = str(write_scenario(tmp_path / "suite"))

    begin_run(suite, Overrides(), out)

    assert resume_run(suite, Overrides(), out).directory.path == out


@pytest.mark.parametrize("there", ["notes.txt", "sessions/0", "config.toml"])
def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path, there: str):
    """A run, or what somebody else has put there."""
    path = tmp_path / "run" / there
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(RunError, match="exists and is not empty"):
        begin_run(str(write_scenario(tmp_path / "suite")), Overrides(), tmp_path / "run")
    assert path.read_text() == "mine"


def test_what_a_killed_run_was_writing_goes_with_the_next_one(tmp_path: Path):
    """Half a file has a name of its own until it is whole."""
    directory = begin_run(str(write_scenario(tmp_path / "suite")), Overrides(), tmp_path / "run").directory
    names = {path.name for path in directory.path.iterdir()}
    (directory.path / ".lock.json.unfinished").write_text("{")
    with directory.occupy():
        directory.write_json(directory.lock, {})
    assert {path.name for path in directory.path.iterdir()} == {*names, "lock.json"}
