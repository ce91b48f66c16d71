"""`steps.jsonl` and `telemetry.jsonl` of a training run: a line for each committed step, in order, and none besides.

A line is written before its step commits, and cut off again by the run that finds it without one. So a step that
happened has its lines, whenever the process was killed. Half a line, which a killed process or a full disk has left,
goes before the next one is written.
"""

import os
from pathlib import Path
from typing import BinaryIO

from harness.machine.disk import disk_failures


class StepFile:
    """One line of JSON per step, from step 0 on. Methods block, and raise `StoreError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def cut(self, steps: int) -> None:
        """Keep the lines of the first `steps` steps."""
        with disk_failures(self._path), self._path.open("ab") as file:
            self._keep_lines(file, steps)

    def append(self, line: bytes) -> None:
        """Write the line of the next step, durably."""
        with disk_failures(self._path), self._path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    self._keep_lines(file)
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[bytes]:
        """The lines that are whole, without their ends."""
        with disk_failures(self._path):
            content = self._path.read_bytes() if self._path.exists() else b""
        return content.split(b"\n")[:-1]

    def _keep_lines(self, file: BinaryIO, steps: int | None = None) -> None:
        file.truncate(sum(len(line) + 1 for line in self.read()[:steps]))
