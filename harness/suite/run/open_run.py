"""Create a run's directory, or resume one."""

from dataclasses import dataclass
from pathlib import Path

from harness.errors import RunError
from harness.suite.exits import NothingSelected
from harness.suite.record.config import Overrides, RunConfig, SuiteSelection, select
from harness.suite.record.rundir import RunDirectory, latest_run, new_run_path
from harness.suite.scenarios.folder import find_scenarios


@dataclass(frozen=True, slots=True)
class OpenedRun:
    selection: SuiteSelection
    directory: RunDirectory


def begin_run(suite: str, overrides: Overrides, out: Path | None, *, trains: bool = False) -> OpenedRun:
    """Begin a run of `suite` in `out`. Raises `RunError` when `out` is taken, `ScenarioError` for a wrong suite."""
    try:
        selection = select(suite, overrides, trains=trains)
    except NothingSelected:
        if _is_run_directory(suite):
            raise RunError(f"{suite} is a run directory: add --resume to continue it") from None
        raise
    return OpenedRun(selection, RunDirectory.create(out or new_run_path(suite), selection.config))


def resume_run(suite: str, overrides: Overrides, out: Path | None, *, trains: bool = False) -> OpenedRun:
    """Resume the run in `out`, the run directory `suite`, or the suite's newest unfinished run.

    Raises `RunError` when there is none, or when its suite, command or configuration differs.
    """
    names_run = _is_run_directory(suite)
    path = out if out is not None or not names_run else Path(suite)
    directory = latest_run(suite) if path is None else RunDirectory(path)
    recorded = RunConfig.load(directory.config)
    if recorded.trains is not trains:
        command = "train" if recorded.trains else "run"
        raise RunError(f"{directory.path} is a run of `harness {command}`: continue it with that command")
    if not names_run:
        asked = [str(folder.directory) for folder in find_scenarios(suite)]
        if asked != [entry.directory for entry in recorded.scenarios]:
            raise RunError(f"{directory.path} is a run of {recorded.suite!r}, not of {suite!r}; name the suite it ran")
    selection = recorded.reload(overrides)
    recorded.check_unchanged(selection.config)
    return OpenedRun(selection, directory)


def _is_run_directory(suite: str) -> bool:
    return RunDirectory(Path(suite)).config.is_file()
