"""Atomic folders: complete or absent, even if the process is killed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import LearnerError


@contextmanager
def write_folder(folder: Path, errors: tuple[type[Exception], ...] = ()) -> Iterator[Path]:
    """Yield an empty folder. If the block succeeds, sync it and rename it to `folder`.

    Raises `LearnerError`, also for `errors` of a writer that has its own for a full disk.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if folder.exists():
        raise LearnerError(f"{folder} exists already; name a new folder, or remove it")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            _sync(path)
        unfinished.rename(folder)
        _sync(folder.parent)  # so that the name survives a power cut
    except OSError as error:
        raise LearnerError(f"{folder} cannot be written: {error}; free space or name another folder") from error
    except errors as error:
        raise LearnerError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
