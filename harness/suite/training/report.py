"""Result of a training run, in `result.json` and for `--json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from harness.sessions.ledger import Ledger
from harness.suite.exits import ExitCode
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.report import RunStatus, ledger_json
from harness.suite.training.step_file import StepFile
from harness.types import Json

TELEMETRY_FILE = "telemetry.jsonl"

_TEN = 10


@dataclass(frozen=True, slots=True)
class TrainReport:
    directory: Path
    wanted: int
    telemetry: Sequence[Mapping[str, float]]
    """Figures of committed steps, in order."""
    ledger: Ledger
    seconds: float
    audit: Json | None = None

    @property
    def is_complete(self) -> bool:
        return len(self.telemetry) >= self.wanted

    @property
    def status(self) -> RunStatus:
        return RunStatus.PASSED if self.is_complete else RunStatus.INTERRUPTED

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode[self.status.name]

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
            "ledger": ledger_json(self.ledger),
            "seconds": self.seconds,
            **({} if self.audit is None else {"audit": self.audit}),
        }

    def _reward(self, *, first: bool = False) -> float | None:
        lines = self.telemetry[:_TEN] if first else self.telemetry[-_TEN:]
        return fmean(line["rollout/reward_mean"] for line in lines) if lines else None


def read_telemetry(directory: RunDirectory, steps: int) -> list[dict[str, float]]:
    """Read the first `steps` steps' figures. Raises `StoreError`."""
    lines = StepFile(directory.path / TELEMETRY_FILE).read()[:steps]
    return [msgspec.json.decode(line, type=dict[str, float]) for line in lines]
