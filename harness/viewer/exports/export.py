"""The folder of an export: written whole or not at all, and only to a new or empty folder."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from harness.errors import RunError
from harness.server.telemetry.printable import printable
from harness.viewer.exports.metrics import MetricPoint
from harness.viewer.exports.spans import write_spans
from harness.viewer.report import make_report

_LONGEST = 100  # characters of a name


def write_tensorboard(source: str, points: Sequence[MetricPoint], folder: Path) -> None:  # noqa: ARG001  # it has no name
    """Write an event file. The same points give the same bytes. Raises `RunError` without tensorboardX."""
    try:
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import RecordWriter
    except ImportError as error:
        raise missing_package("tensorboard", error) from None
    began = min((point.at for point in points), default=0.0)
    # Not `SummaryWriter`, which puts this machine and time into the file name.
    file = RecordWriter(str(folder / "events.out.tfevents.0.harness"))
    file.write(Event(wall_time=began, file_version="brain.Event:2").SerializeToString())
    for point in points:
        for key, value in point.figures.items():
            said = summary.scalar(key, value)
            file.write(Event(wall_time=point.at, step=point.step, summary=said).SerializeToString())
    file.close()


def write_wandb(source: str, points: Sequence[MetricPoint], folder: Path) -> None:
    """Write an offline run for `wandb sync`. Raises `RunError` without wandb."""
    try:
        import wandb
    except ImportError as error:
        raise missing_package("wandb", error) from None
    # Set here whatever the environment says, so that wandb reads and records nothing of this machine.
    settings = wandb.Settings(
        mode="offline",
        console="off",
        silent=True,
        host="harness",
        disable_git=True,
        save_code=False,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    run = wandb.init(project="harness", name=printable(source)[-_LONGEST:], dir=str(folder), settings=settings)
    try:
        for kind in ("session", "training"):
            run.define_metric(f"{kind}_step", hidden=True)
            for key in sorted({key for point in points if point.kind == kind for key in point.figures}):
                run.define_metric(key, step_metric=f"{kind}_step")
        for point in points:
            if point.kind == "run":
                run.summary.update(dict(point.figures))
            else:
                run.log({f"{point.kind}_step": point.step, **point.figures})
    finally:
        run.finish()
        wandb.teardown()
    for path in list((folder / "wandb").rglob("*")):
        # These link to logs in the home folder and to the scratch folder.
        if path.is_symlink():
            path.unlink()
    for logs in (folder / "wandb").glob("*/logs"):
        shutil.rmtree(logs)


def missing_package(extra: str, error: ImportError) -> RunError:
    return RunError(f"--format {extra} needs its packages ({error}): pip install 'session-harness[{extra}]'")


class ExportFormat(StrEnum):
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
