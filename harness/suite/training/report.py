"""Result of a training run: printed, in `result.json`, and for `--json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from harness.sessions.ledger import Ledger
from harness.suite.exits import ExitCode
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.report import RunStatus
from harness.suite.training.step_file import StepFile
from harness.types import Json

TELEMETRY_FILE = "telemetry.jsonl"

_TEN = 10


@dataclass(frozen=True, slots=True)
class TrainReport:
    """A training run so far."""

    directory: Path
    wanted: int
    telemetry: Sequence[Mapping[str, float]]
    """Figures of committed steps, in order."""
    ledger: Ledger
    seconds: float
    """Duration of this process."""

    @property
    def is_complete(self) -> bool:
        return len(self.telemetry) >= self.wanted

    @property
    def status(self) -> RunStatus:
        return RunStatus.PASSED if self.is_complete else RunStatus.INTERRUPTED

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode[self.status.name]

    @property
    def text(self) -> str:
        ledger = self.ledger
        first, last = _show(self._reward(first=True)), _show(self._reward())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ledger.dropped.items()))
        dropped = f"{sum(ledger.dropped.values()):,} dropped{f' ({reasons})' if reasons else ''}"
        books = f"{ledger.sources} = {ledger.trained:,} trained + {ledger.masked:,} masked + {dropped}"
        return "\n".join(
            [
                f"steps    {len(self.telemetry)} of {self.wanted}, {self.seconds:.1f} s",
                f"reward   {first} in the first ten steps, {last} in the last ten",
                f"ledger   {books}; difference {ledger.difference}",
                f"run      {self.directory}",
            ]
        )

    def to_json(self) -> Json:
        """Return the content of `result.json`."""
        return {
            "status": str(self.status),
            "exit_code": int(self.exit_code),
            "directory": str(self.directory),
            "steps": len(self.telemetry),
            "steps_wanted": self.wanted,
            "reward_mean_first_ten": self._reward(first=True),
            "reward_mean_last_ten": self._reward(),
            "ledger": {**self.ledger.to_json(), "difference": self.ledger.difference},
            "seconds": self.seconds,
        }

    def _reward(self, *, first: bool = False) -> float | None:
        lines = self.telemetry[:_TEN] if first else self.telemetry[-_TEN:]
        return fmean(line["rollout/reward_mean"] for line in lines) if lines else None


def read_telemetry(directory: RunDirectory, steps: int) -> list[dict[str, float]]:
    """Read the first `steps` steps' figures. Raises `StoreError`."""
    lines = StepFile(directory.path / TELEMETRY_FILE).read()[:steps]
    return [msgspec.json.decode(line, type=dict[str, float]) for line in lines]


def _show(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"
