"""Figures of a training run: a line per committed step, and the result in `result.json` and for `--json`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import BinaryIO

from harness.decoding import read_json
from harness.machine.disk import disk_failures
from harness.sessions.ledger import Ledger
from harness.suite.exits import ExitCode
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.report import RunStatus, ledger_json
from harness.types import Json

TELEMETRY_FILE = "telemetry.jsonl"

_TEN = 10


class StepFile:
    """`steps.jsonl` or `telemetry.jsonl`: JSON lines from step 0 on. Methods block, and raise `StoreError`.

    Lines are written before the commit; a resumed run removes uncommitted ones. A partial line (after a kill, or on a
    full disk) is removed before the next write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def cut(self, steps: int) -> None:
        """Keep only the lines of the first `steps` steps."""
        with disk_failures(self._path), self._path.open("ab") as file:
            self._keep_lines(file, steps)

    def append(self, line: bytes) -> None:
        with disk_failures(self._path), self._path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    self._keep_lines(file)
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[bytes]:
        """Return complete lines, without newlines."""
        with disk_failures(self._path):
            content = self._path.read_bytes() if self._path.exists() else b""
        return content.split(b"\n")[:-1]

    def _keep_lines(self, file: BinaryIO, steps: int | None = None) -> None:
        file.truncate(sum(len(line) + 1 for line in self.read()[:steps]))


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
    return [read_json(line, dict[str, float]) for line in lines]
