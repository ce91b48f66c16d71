"""The rollouts of a run that failed, as `--only failed` chooses those that are played again.

A rollout failed when it came to an end that was neither its own nor a limit's. Its causes are its outcome (`crashed`,
`timed_out`) and the party to blame (`agent`, `limit`): the words of the run's report. One that met a fault of its
scenario ended as the scenario wanted to see, and one that was stopped with its run is unfinished: neither has failed.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from harness.errors import Cause, RunError
from harness.samples.rollout import ENDED_WELL, OutcomeKind
from harness.suite.record.rollout_table import RolloutRecord, read_rollouts
from harness.suite.record.rundir import RunDirectory

_FAILING = [kind for kind in OutcomeKind if kind not in ENDED_WELL and kind is not OutcomeKind.DRAINED]


@dataclass(frozen=True, slots=True)
class FailedOnly:
    """Failed rollouts, of all causes or of those in `causes`."""

    causes: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Self:
        """`failed` or `failed:CAUSE[,CAUSE]`. Raises `RunError` for anything else."""
        word, colon, names = text.partition(":")
        causes = frozenset(name.strip() for name in names.split(",")) if colon else frozenset()
        if word != "failed" or "" in causes:
            raise RunError(f"--only: expected failed or failed:CAUSE[,CAUSE], got {text!r}")
        return cls(causes)

    def find(self, directory: RunDirectory) -> frozenset[int]:
        """The numbers of these rollouts in the run of `directory`, maybe none.

        Raises `RunError` for a cause that there is not, with those of this run, and when the run goes on elsewhere.
        """
        with directory.occupy():
            records = read_rollouts(directory.database) if directory.database.is_file() else {}
        return self.choose(records)

    def choose(self, records: Mapping[int, RolloutRecord]) -> frozenset[int]:
        """The numbers of these rollouts among `records`. Raises `RunError` for a cause that there is not."""
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
    """Empty when the rollout has not failed."""
    if record.outcome not in _FAILING or record.met_fault:
        return ()
    return (record.outcome.value, *([record.cause.value] if record.cause else []))
