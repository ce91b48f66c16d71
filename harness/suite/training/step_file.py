"""`steps.jsonl` and `telemetry.jsonl`: one line per committed step.

Lines are written before the commit; a resumed run removes uncommitted ones. A partial line, after a kill or on a full
disk, is removed before the next write.
"""

import os
from pathlib import Path
from typing import BinaryIO

from harness.machine.disk import disk_failures


class StepFile:
    """JSON lines from step 0 on. Methods block, and raise `StoreError`."""

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
