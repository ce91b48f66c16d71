"""The folder of an export: written whole or not at all, and only to a new or empty folder."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from harness.errors import RunError
from harness.viewer.exports.spans import write_spans
from harness.viewer.exports.stores import write_tensorboard, write_wandb
from harness.viewer.report import make_report


class ExportFormat(StrEnum):
    """Target program of an export."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    OTEL = "otel"


class Exported(NamedTuple):
    written: int
    missing: Sequence[str]
    """A sentence for each missing part."""


def export_run(run: Path, out: Path, kind: ExportFormat) -> Exported:
    """Write the figures or spans of `run` to the folder `out`. Raises `RunError` or `StoreError`."""
    with _new_folder(out) as folder:
        if kind is ExportFormat.OTEL:
            missing: list[str] = []
            return Exported(write_spans(run, folder, missing), missing)
        report = make_report(run)
        write = write_tensorboard if kind is ExportFormat.TENSORBOARD else write_wandb
        write(report.source, report.points, folder)
        return Exported(sum(len(point.figures) for point in report.points), report.missing)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise RunError(f"expected a new or empty folder, found something else at {out}: name another one with --out")
    try:
        # Beside `out`, so that the rename is atomic.
        with TemporaryDirectory(dir=out.parent, prefix=".export.") as scratch:
            folder = Path(scratch) / "folder"
            folder.mkdir()
            yield folder
            folder.rename(out)
    except OSError as error:
        raise RunError(f"expected a place for a folder, cannot write {out}: {error.strerror}") from error
