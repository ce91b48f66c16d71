"""`steps.jsonl` and `telemetry.jsonl` of a training run: a line for each committed step, in order, and none besides.

A line is written before its step commits, and cut off again by the run that finds it without one. So a step that
happened has its lines, whenever the process was killed.
"""

import os
from pathlib import Path

from harness.machine.disk import disk_failures


class StepFile:
    """One line of JSON per step, from step 0 on. Methods block, and raise `StoreError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def cut(self, steps: int) -> None:
        """Keep the lines of the first `steps` steps."""
        with disk_failures(self._path):
            lines = self.read()[:steps]
            with self._path.open("ab") as file:
                file.truncate(sum(len(line) + 1 for line in lines))

    def append(self, line: bytes) -> None:
        """Write the line of the next step, durably."""
        with disk_failures(self._path), self._path.open("ab") as file:
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[bytes]:
        """The lines that are whole, without their ends."""
        with disk_failures(self._path):
            content = self._path.read_bytes() if self._path.exists() else b""
        return content.split(b"\n")[:-1]
