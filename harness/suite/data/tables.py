"""Arrow, Parquet and CSV in bounded memory: Arrow files are mapped, and the others become such files."""

import tempfile
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import msgspec

from harness.errors import ScenarioError
from harness.types import Json

_BATCH_ROWS = 1024
_GROUPS_KEPT = 16
"""Row groups that stay on disk as Arrow; a shuffled order comes back to them."""


class ArrowFile:
    """Arrow IPC, as a file or a stream."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _readable(str(path)):
            table = self._open_table()
        self.columns: Sequence[str] = table.column_names
        self._ends = [0, table.num_rows]
        """Ends of the row groups, behind 0."""
        self._group: Callable[[int], Any] = lambda _: table

    def __len__(self) -> int:
        return int(self._ends[-1])

    def scan(self, columns: Collection[str]) -> Iterator[Json]:
        wanted = [name for name in self.columns if name in columns]
        with _readable(str(self._path)):
            for batch in self._batches(wanted):
                # Dates and decimals become text, bytes base64.
                yield from msgspec.to_builtins(batch.to_pylist())

    def read(self, number: int) -> Json:
        group = bisect_right(self._ends, number) - 1
        with _readable(self.where(number)):
            [row] = self._group(group).slice(number - self._ends[group], 1).to_pylist()
            return cast("Json", msgspec.to_builtins(row))

    def where(self, number: int) -> str:
        return f"{self._path}: row {number + 1}"

    def _open_table(self) -> Any:
        return _map_arrow(self._path)

    def _batches(self, columns: list[str]) -> Iterator[Any]:
        return iter(self._group(0).select(columns).to_batches(_BATCH_ROWS))


class CsvFile(ArrowFile):
    """Comma-separated texts below a header; a quoted text may span lines."""

    def _open_table(self) -> Any:
        import pyarrow as pa
        from pyarrow import csv

        # Without threads, an error names its row.
        reading = csv.ReadOptions(use_threads=False)
        parsing = csv.ParseOptions(newlines_in_values=True)
        with csv.open_csv(self._path, read_options=reading, parse_options=parsing) as reader:
            texts = csv.ConvertOptions(column_types=dict.fromkeys(reader.schema.names, pa.string()))
        reader = csv.open_csv(self._path, read_options=reading, parse_options=parsing, convert_options=texts)
        return _map_batches(reader.schema, reader)


class ParquetFile(ArrowFile):
    """Parquet. Reading a row decodes its row group."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _readable(str(path)):
            file = self._open()
            self.columns = file.schema_arrow.names
            groups = (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
            self._ends = [0, *accumulate(groups)]
        self._group = lru_cache(maxsize=_GROUPS_KEPT)(self._decode)

    def _batches(self, columns: list[str]) -> Iterator[Any]:
        return cast("Iterator[Any]", self._open().iter_batches(_BATCH_ROWS, columns=columns))

    def _open(self) -> Any:
        import pyarrow.parquet as pq

        return pq.ParquetFile(self._path, memory_map=True, pre_buffer=False)

    def _decode(self, group: int) -> Any:
        file = self._open()
        return _map_batches(file.schema_arrow, file.iter_batches(_BATCH_ROWS, row_groups=[group]))


def _map_batches(schema: Any, batches: Iterable[Any]) -> Any:
    import pyarrow as pa

    with tempfile.NamedTemporaryFile(prefix="harness-rows-", suffix=".arrow") as scratch:
        with pa.ipc.new_file(scratch.name, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return _map_arrow(Path(scratch.name))


def _map_arrow(path: Path) -> Any:
    import pyarrow as pa

    source = pa.memory_map(str(path))
    try:
        return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """Raise `ScenarioError` for what pyarrow cannot read, and without pyarrow."""
    try:
        import pyarrow as pa
    except ImportError:
        raise ScenarioError(f"{where}: expected pyarrow to read it: pip install 'session-harness[parquet]'") from None
    try:
        yield
    except (pa.ArrowException, ValueError, TypeError, OSError) as error:
        raise ScenarioError(f"{where}: expected a table with text in UTF-8: {error}") from None
