"""Rows of a data set: all in order, or one by its number."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from harness.errors import ScenarioError
from harness.suite.data.data_files import find_data_files
from harness.suite.data.json_lines import JsonLinesFile
from harness.suite.data.tables import ArrowFile, CsvFile, ParquetFile
from harness.types import Json


class Rows(Protocol):
    """Rows by number, from 0. Methods raise `ScenarioError`."""

    @property
    def columns(self) -> Sequence[str]:
        """Columns; of JSON lines, those of the first row."""

    def __len__(self) -> int: ...

    def scan(self, columns: Collection[str]) -> Iterator[Json]:
        """Yield all rows with at least `columns`."""

    def read(self, number: int) -> Json:
        """Return a row. Any thread may call."""

    def where(self, number: int) -> str:
        """Describe the place of a row."""


_KINDS: dict[str, Callable[[Path], Rows]] = {".csv": CsvFile, ".parquet": ParquetFile, ".arrow": ArrowFile}
"""Kinds of files by suffix; any other is JSON lines."""


class DataSet:
    """Files of a data set, one after the other, as `Rows`."""

    def __init__(self, path: Path, split: str | None) -> None:
        """Open a file or a folder. Raises `ScenarioError`."""
        self.files = find_data_files(path, split)
        self._parts = [_KINDS.get(file.suffix, JsonLinesFile)(file) for file in self.files]
        self._ends = list(accumulate(map(len, self._parts)))
        if not any(self._ends):
            raise ScenarioError(f"{path}: expected rows, got none")
        self.columns = next(part for part in self._parts if len(part)).columns

    def __len__(self) -> int:
        return self._ends[-1]

    def scan(self, columns: Collection[str]) -> Iterator[Json]:
        for part in self._parts:
            yield from part.scan(columns)

    def read(self, number: int) -> Json:
        part, number = self._place(number)
        return part.read(number)

    def where(self, number: int) -> str:
        part, number = self._place(number)
        return part.where(number)

    def _place(self, number: int) -> tuple[Rows, int]:
        index = bisect_right(self._ends, number)
        return self._parts[index], number - (self._ends[index - 1] if index else 0)
