"""Select failed rollouts to replay: `--only failed`.

A rollout failed unless it finished, hit a session limit, met a fault of its scenario, or was stopped with the run. Its
causes are its outcome (`crashed`) and the party to blame (`agent`), as in the report.
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
