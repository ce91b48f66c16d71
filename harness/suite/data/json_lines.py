"""JSON lines, by an index of their starts. Blank lines at the end are none."""

import json
from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from harness.errors import ScenarioError
from harness.types import Json

_SHOWN = 60
"""Characters shown of a wrong row."""


class JsonLinesFile:
    """One JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, position, count = array("q", [0]), 0, 0
        """Starts of the lines, and the end of the last one."""
        with _open(path) as file:
            for line in file:
                position += len(line)
                self._starts.append(position)
                count = count if line.isspace() else len(self)
        del self._starts[count + 1 :]
        self.columns: Sequence[str] = tuple(self.read(0)) if len(self) else ()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def scan(self, columns: Collection[str]) -> Iterator[Json]:
        del columns  # a line is read whole
        with _open(self._path) as file:
            for number, line in enumerate(islice(file, len(self))):
                yield self._parse(number, line)

    def read(self, number: int) -> Json:
        with _open(self._path) as file:
            file.seek(self._starts[number])
            return self._parse(number, file.read(self._starts[number + 1] - self._starts[number]))

    def where(self, number: int) -> str:
        return f"{self._path}:{number + 1}"

    def _parse(self, number: int, line: bytes) -> Json:
        try:
            row = json.loads(line.decode())
            json.dumps(row, ensure_ascii=False).encode()  # UTF-8 has no lone surrogates, which JSON can name
        except (ValueError, RecursionError) as error:
            row, problem = line.decode(errors="replace").rstrip("\n"), f": {error}"
        else:
            if isinstance(row, dict):
                return row
            problem = ""
        raise ScenarioError(
            f"{self.where(number)}: expected a JSON object in UTF-8, got {str(row)[:_SHOWN]!r}{problem}"
        )


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from None
