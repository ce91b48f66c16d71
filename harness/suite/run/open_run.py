"""Create a run's directory, resume one, or select its failed rollouts to replay: `--only failed`.

A rollout failed unless it finished, hit a session limit, met a fault of its scenario, or was stopped with the run. Its
causes are its outcome (`crashed`) and the party to blame (`agent`), as in the report.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harness.errors import Cause, RunError
from harness.samples.rollout import ENDED_WELL, OutcomeKind
from harness.suite.exits import NothingSelected
from harness.suite.record.config import Overrides, RunConfig, SuiteSelection, select
from harness.suite.record.rollout_table import RolloutRecord, read_rollouts
from harness.suite.record.rundir import RunDirectory, latest_run, new_run_path
from harness.suite.scenarios.folder import find_scenarios

_FAILING = [kind for kind in OutcomeKind if kind not in ENDED_WELL and kind is not OutcomeKind.DRAINED]


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


@dataclass(frozen=True, slots=True)
class FailedOnly:
    """Failed rollouts, of all causes or of `causes`."""

    causes: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `failed` or `failed:CAUSE[,CAUSE]`. Raises `RunError`."""
        word, colon, names = text.partition(":")
        causes = frozenset(name.strip() for name in names.split(",")) if colon else frozenset()
        if word != "failed" or "" in causes:
            raise RunError(f"--only: expected failed or failed:CAUSE[,CAUSE], got {text!r}")
        return cls(causes)

    def find(self, directory: RunDirectory) -> frozenset[int]:
        """Return the numbers of these rollouts in a run. Raises `RunError` for an unknown cause, or a run at work."""
        with directory.occupy():
            records = read_rollouts(directory.database) if directory.database.is_file() else {}
        return self.choose(records)

    def choose(self, records: Mapping[int, RolloutRecord]) -> frozenset[int]:
        """Return their numbers among `records`. Raises `RunError` for an unknown cause."""
        failed = {number: causes for number, record in records.items() if (causes := _causes_of(record))}
        unknown = self.causes.difference(_FAILING, Cause)
        if unknown:
            counts = Counter(cause for causes in failed.values() for cause in causes)
            listed = ", ".join(f"{cause} ({count})" for cause, count in counts.most_common()) or "none"
            raise RunError(
                f"--only: expected causes of failed rollouts, got {', '.join(sorted(unknown))};"
                f" those of this run: {listed}"
            )
        return frozenset(
            number for number, causes in failed.items() if not self.causes or self.causes.intersection(causes)
        )


def _causes_of(record: RolloutRecord) -> tuple[str, ...]:
    if record.outcome not in _FAILING or record.met_fault:
        return ()
    return (record.outcome.value, *([record.cause.value] if record.cause else []))
