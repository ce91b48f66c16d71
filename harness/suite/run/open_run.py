"""How a run comes to its directory: a new one, or one that is taken up where it stopped."""

from dataclasses import dataclass
from pathlib import Path

from harness.errors import RunError
from harness.suite.exits import NothingSelected
from harness.suite.record.config import Overrides, RunConfig, SuiteSelection, select
from harness.suite.record.rundir import RunDirectory, latest_run, new_run_path
from harness.suite.scenarios.folder import find_scenarios


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run that is ready to be executed."""

    selection: SuiteSelection
    directory: RunDirectory


def begin_run(suite: str, overrides: Overrides, out: Path | None) -> OpenedRun:
    """A new run of `suite` in `out`. Raises `RunError` when `out` is taken, `ScenarioError` when the suite is wrong."""
    try:
        selection = select(suite, overrides)
    except NothingSelected:
        if _is_run_directory(suite):
            raise RunError(f"{suite} is a run directory: add --resume to go on with it") from None
        raise
    return OpenedRun(selection, RunDirectory.create(out or new_run_path(suite), selection.config))


def resume_run(suite: str, overrides: Overrides, out: Path | None) -> OpenedRun:
    """The run in `out`, the run directory `suite`, or the newest unfinished run of `suite`.

    Raises `RunError` when there is none, when it is a run of something else, or when its configuration has changed.
    """
    directory = _directory_to_resume(suite, out)
    recorded = RunConfig.load(directory.config)
    if not _is_run_directory(suite):
        _check_same_suite(suite, recorded, directory)
    selection = recorded.reload(overrides)
    recorded.check_unchanged(selection.config)
    return OpenedRun(selection, directory)


def _directory_to_resume(suite: str, out: Path | None) -> RunDirectory:
    if out is not None:
        return RunDirectory(out)
    return RunDirectory(Path(suite)) if _is_run_directory(suite) else latest_run(suite)


def _is_run_directory(suite: str) -> bool:
    return RunDirectory(Path(suite)).config.is_file()


def _check_same_suite(suite: str, recorded: RunConfig, directory: RunDirectory) -> None:
    asked = [str(folder.directory) for folder in find_scenarios(suite)]
    if asked != [entry.directory for entry in recorded.scenarios]:
        raise RunError(f"{directory.path} is a run of {recorded.suite!r}, not of {suite!r}; name the suite it ran")
