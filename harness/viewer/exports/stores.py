"""A report's points as TensorBoard and Weights & Biases files, without network or login."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from harness.errors import RunError
from harness.server.telemetry.printable import printable
from harness.viewer.exports.metrics import MetricPoint

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
    """Return the error for an extra that is not installed."""
    return RunError(f"--format {extra} needs its packages ({error}): pip install 'session-harness[{extra}]'")
