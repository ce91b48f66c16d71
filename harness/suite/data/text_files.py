"""JSON lines and CSV: an index of where rows begin, eight bytes a row, finds each of them again."""

import csv
import json
from array import array
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Self

from harness.errors import ScenarioError
from harness.types import Json

_SHOWN = 60
"""Characters shown of a wrong row."""


class JsonLinesFile:
    """One JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, position = array("q"), 0
        with _opened(path) as file:
            for line in file:
                self._starts.append(position)
                position += len(line)
        self._starts.append(position)
        self.columns: Sequence[str] = tuple(self.read(0)) if len(self) else ()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def scan(self, columns: Collection[str]) -> Iterator[Json]:
        del columns  # a line is read whole
        with _opened(self._path) as file:
            for number, line in enumerate(file):
                yield self._parse(number, line)

    def read(self, number: int) -> Json:
        with _opened(self._path) as file:
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


class CsvFile:
    """Comma-separated texts below a header; a quoted text may span lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _opened(path) as file:
            records = _Records(file)
            try:
                self.columns: Sequence[str] = next(records, [])
                self._starts = array("q", (records.start for _ in records))
            except (ValueError, csv.Error) as error:
                raise ScenarioError(f"{path}: expected CSV in UTF-8, got line {records.line}: {error}") from None

    def __len__(self) -> int:
        return len(self._starts)

    def scan(self, columns: Collection[str]) -> Iterator[Json]:
        del columns  # a line is read whole
        with _opened(self._path) as file:
            records = _Records(file)
            next(records)
            for number, fields in enumerate(records):
                yield self._row(number, fields)

    def read(self, number: int) -> Json:
        with _opened(self._path) as file:
            file.seek(self._starts[number])
            return self._row(number, next(_Records(file)))

    def where(self, number: int) -> str:
        return f"{self._path}: row {number + 1}"

    def _row(self, number: int, fields: Sequence[str]) -> Json:
        if len(fields) != len(self.columns):
            raise ScenarioError(f"{self.where(number)}: expected {len(self.columns)} fields, got {len(fields)}")
        return dict(zip(self.columns, fields, strict=True))


class _Records(Iterator[list[str]]):
    """CSV records that are not empty, and the byte at which the last one starts."""

    def __init__(self, file: BinaryIO) -> None:
        self.start, self._end, self.line = 0, file.tell(), 0
        self._file = file
        self._reader = csv.reader(self._lines(), strict=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[str]:
        fields: list[str] = []
        while not fields:
            self.start = self._end
            fields = next(self._reader)
        return fields

    def _lines(self) -> Iterator[str]:
        for line in self._file:
            self.line += 1
            self._end += len(line)
            yield line.decode("utf-8-sig" if self._end == len(line) else "utf-8")


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from None
