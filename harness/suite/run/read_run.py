"""A run directory, read back: what its rollouts came to, without SQL and without the program that made it.

Reading takes no lock and writes nothing, so a run that still goes on, or was killed, can be looked at. The rollouts are
those that had ended when it was read; `result.json` is only asked how the run ended.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import RunError
from harness.samples.rollout import OutcomeKind
from harness.sessions.ledger import Ledger
from harness.suite.judge.accounting import ledger_of
from harness.suite.judge.witness import Witness
from harness.suite.record.rollout_table import ExportedSamples, RolloutRecord, read_rollouts
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.hearings import read_hearings
from harness.suite.run.report import RunStatus


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The contents of a run directory."""

    path: Path
    status: RunStatus | None
    """How the run ended; None of one that goes on, or was stopped or killed before it was complete."""
    rollouts: tuple[RolloutRecord, ...]
    """Those that have ended, by number; of a rollout that ran more than once the last attempt."""
    ledger: Ledger
    """Where every token went that the run's engines sampled. Tokens of sessions without a final rollout, one that
    still runs included, are dropped as `interrupted`."""
    witness: Witness
    """The engines' account of it, by their own counters."""

    @property
    def samples(self) -> ExportedSamples:
        """Iterates over the samples that a trainer gets, as in `samples.jsonl`: those of final rollouts, in order.

        `index` is the number of a sample's rollout and `group_index` its prompt's. Only one rollout's samples are in
        memory at a time; each iteration reads them anew from `run.db`.
        """
        return ExportedSamples([rollout for rollout in self.rollouts if rollout.is_final])

    @property
    def outcomes(self) -> Mapping[OutcomeKind, int]:
        """How many rollouts ended in which way."""
        return Counter(rollout.outcome for rollout in self.rollouts)


def read_run(path: Path | str) -> RecordedRun:
    """The run in the directory `path`, complete or not; nothing is written or locked.

    Raises `RunError` when `path` is no run directory or holds a damaged report, `StoreError` when its database cannot
    be read, and `LedgerImbalance` when its tokens do not add up.
    """
    directory = RunDirectory(Path(path))
    if not directory.config.is_file():
        raise RunError(f"{path} is not a run directory: it has no {directory.config.name}")
    status = None
    if directory.is_complete:
        written = directory.read_result()["status"]
        try:
            status = RunStatus(written)
        except ValueError:
            known = ", ".join(RunStatus)
            raise RunError(f"{directory.result}: status: expected one of {known}, got {written!r}") from None
    if not directory.database.is_file():  # killed before its first session
        if status is not None:
            raise RunError(f"{path} is a complete run without its {directory.database.name}: the rollouts are gone")
        return RecordedRun(directory.path, None, (), Ledger(), Witness.of([], Ledger()))
    hearings = read_hearings(directory)
    # The order matters: a rollout that ends in between has its tokens in the ledger, as `interrupted`.
    rollouts = tuple(read_rollouts(directory.database).values())
    ledger = ledger_of(directory.database, [rollout for rollout in rollouts if rollout.is_final])
    return RecordedRun(directory.path, status, rollouts, ledger, Witness.of(hearings, ledger))
