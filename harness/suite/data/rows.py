"""Rows of a data set: all in order, or one by its number; and filters of them.

A filter is `column=value`, or `!=`, `<`, `<=`, `>`, `>=`, `~`; `a.b` is `b` in `a`.
"""

import json
import operator
import re
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from harness.errors import ScenarioError
from harness.suite.data.tables import ArrowFile, CsvFile, ParquetFile
from harness.types import Json

_FORM = re.compile(r"\s*([^=!<>~]+?)\s*(!=|<=|>=|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "~": lambda found, wanted: re.search(wanted, found) is not None,
}

_SHOWN = 60


class JsonLinesFile:
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


DATA_SUFFIXES = (".parquet", ".csv", ".arrow", ".jsonl", ".ndjson")

_STATE = "state.json"
"""List of the data files next to it, in order."""
_SHARD = re.compile(r"[-_./]?\d+(-of-\d+)?(-[0-9a-f]{16})?$")


def find_data_files(path: Path, split: str | None) -> list[Path]:
    """Return the data files of `path`, in order. Raises `ScenarioError` unless one split is meant."""
    if not path.is_dir():
        if split is not None:
            raise ScenarioError(f"{path}: expected a folder with data.split = {split!r}, got a file")
        return [path]
    splits = _saved_splits(path) or _hub_splits(path)
    if not splits:
        raise ScenarioError(f"{path}: expected files of a data set ({', '.join(DATA_SUFFIXES)}), got a folder of none")
    fitting = [name for name in splits if split is None or name == split or name.endswith(f"/{split}")]
    if len(fitting) != 1:
        got = "none" if split is None else repr(split)
        raise ScenarioError(f"{path}: data.split: expected one of {', '.join(splits)}, got {got}")
    return splits[fitting[0]]


def _saved_splits(path: Path) -> dict[str, list[Path]]:
    splits = {}
    for state in sorted(path.rglob(_STATE)):
        try:
            names = [str(each["filename"]) for each in json.loads(state.read_bytes())["_data_files"]]
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise ScenarioError(f"{state}: expected the file of a saved data set, got another: {error!r}") from None
        if outside := [name for name in names if Path(name).name != name]:
            raise ScenarioError(f"{state}: expected files of its folder, got {outside[0]!r}")
        splits[state.parent.relative_to(path).as_posix()] = [state.parent / name for name in names]
    return splits


def _hub_splits(path: Path) -> dict[str, list[Path]]:
    splits = defaultdict(list)
    for file in sorted(each for each in path.rglob("*") if each.suffix in DATA_SUFFIXES):
        splits[_SHARD.sub("", file.relative_to(path).with_suffix("").as_posix())].append(file)
    return dict(splits)


class Rows(Protocol):
    """Rows by number, from 0. Methods raise `ScenarioError`."""

    @property
    def columns(self) -> Sequence[str]:
        """Columns; of JSON lines, the first row's."""

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


@dataclass(frozen=True, slots=True)
class Filter:
    column: str
    operator: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a filter. Raises `ScenarioError`."""
        form = _FORM.fullmatch(text)
        if form is None:
            raise ScenarioError(f"filter: expected COLUMN=VALUE, or one of != < <= > >= ~, got {text!r}")
        if form[2] == "~":
            try:
                re.compile(form[3])
            except re.error as error:
                raise ScenarioError(
                    f"filter: expected a regular expression behind ~, got {form[3]!r}: {error}"
                ) from None
        return cls(form[1], form[2], form[3])

    @property
    def top(self) -> str:
        """Column of the row that holds the value."""
        return self.column.partition(".")[0]

    def fits(self, row: Json) -> bool:
        """Return True if it holds. A missing value is `null`, in no order.

        Numbers compare by value, and so does the order of texts that name numbers; anything else compares as text.
        """
        value: Any = row
        for name in [self.column] if self.column in row else self.column.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is None and self.operator not in ("=", "!="):
            return False
        found = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self.operator[0] in "<>" or (self.operator != "~" and isinstance(value, int | float)):
            with suppress(ValueError):
                return _COMPARE[self.operator](_number(found), _number(self.value))
        return _COMPARE[self.operator](found, self.value)


def _number(text: str) -> int | float:
    try:
        return int(text)  # exact, which a float of 2^53 or more is not
    except ValueError:
        return float(text)
