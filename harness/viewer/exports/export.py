"""The folder of an export: there as a whole or not at all, and in the place of nothing but an empty folder."""

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
    """For which program a run is written."""

    TENSORBOARD = "tensorboard"
    """An event file of its figures."""
    WANDB = "wandb"
    """Its figures as an offline run of Weights & Biases."""
    OTEL = "otel"
    """Its sessions, turns and engine requests as the spans of OpenTelemetry."""


class Exported(NamedTuple):
    """What was written."""

    written: int
    """Of values, or of spans."""
    missing: Sequence[str]
    """What could not be had, a sentence each."""


def export_run(run: Path, out: Path, kind: ExportFormat) -> Exported:
    """Write the figures or the spans of `run` into the folder `out`.

    Raises `RunError` of a path that is no run, of a place that is taken or cannot be written, and where packages are
    missing; `StoreError` of a bad store.
    """
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
    """A folder that becomes `out` when the block ends well, and is gone otherwise."""
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise RunError(f"expected a new or empty folder, found something else at {out}: name another one with --out")
    try:
        with TemporaryDirectory(dir=out.parent, prefix=".export.") as scratch:
            folder = Path(scratch) / "folder"
            folder.mkdir()
            yield folder
            folder.rename(out)
    except OSError as error:
        raise RunError(f"expected a place for a folder, cannot write {out}: {error.strerror}") from error
