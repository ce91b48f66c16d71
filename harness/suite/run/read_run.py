"""Read a run directory, without locking or writing, even while the run executes or after a kill."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from harness.errors import RunError
from harness.notebook import card, table
from harness.samples.rollout import OutcomeKind
from harness.sessions.ledger import Ledger
from harness.suite.judge.accounting import ledger_of
from harness.suite.judge.witness import Witness
from harness.suite.record.rollout_table import ExportedSamples, RolloutRecord, read_rollouts
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.report import RunStatus
from harness.suite.run.token_readings import read_token_readings


@dataclass(frozen=True, slots=True)
class RecordedRun:
    path: Path
    status: RunStatus | None
    """None for a run that is executing, stopped or killed."""
    rollouts: tuple[RolloutRecord, ...]
    """Ended rollouts by number, last attempts only."""
    ledger: Ledger
    """Account of every token that the run's engines sampled. Tokens without a final rollout are `interrupted`."""
    witness: Witness
    """Comparison with the engines' counters."""

    @property
    def samples(self) -> ExportedSamples:
        """Samples of final rollouts, as in `samples.jsonl`. Each iteration reads `run.db`, one rollout at a time."""
        return ExportedSamples([rollout for rollout in self.rollouts if rollout.is_final])

    @property
    def outcomes(self) -> Mapping[OutcomeKind, int]:
        return Counter(rollout.outcome for rollout in self.rollouts)

    def _repr_html_(self) -> str:
        rewards = [rollout.reward for rollout in self.rollouts if rollout.reward is not None]
        facts: dict[str, object] = {str(kind): count for kind, count in self.outcomes.items()}
        facts["mean reward"] = fmean(rewards) if rewards else None
        facts |= {name: getattr(self.ledger, name) for name in ("generated", "trained", "masked")}
        facts |= {f"dropped as {reason}": count for reason, count in self.ledger.dropped.items()}
        head = ("rollout", "scenario", "outcome", "reward", "trained", "why")
        lines = [
            (each.number, each.scenario, each.outcome, each.reward, each.ledger.trained, each.detail)
            for each in self.rollouts
        ]
        return card(f"Run: {self.status or 'not complete'}", facts, table(head, lines))


def read_run(path: Path | str) -> RecordedRun:
    """Read a run, complete or not.

    Raises `RunError` when `path` is not a run or its report is damaged, `StoreError` when its database cannot be read,
    and `LedgerImbalance` when its tokens do not add up.
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
    hearings = read_token_readings(directory)
    # Rollouts before ledger: a rollout that ends in between then counts as `interrupted`, and the ledger balances.
    rollouts = tuple(read_rollouts(directory.database).values())
    ledger = ledger_of(directory.database, [rollout for rollout in rollouts if rollout.is_final])
    return RecordedRun(directory.path, status, rollouts, ledger, Witness.of(hearings, ledger))
