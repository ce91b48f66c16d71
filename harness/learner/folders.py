"""Folders that are there whole or not at all, also when the process is killed while it writes one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import LearnerError


@contextmanager
def write_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder`, to be filled; it takes that name when the block ends well, and goes otherwise.

    Its files are on the disk before it takes its name. Raises `LearnerError` when `folder` exists already or something
    cannot be written, and removes what a process that was killed had left.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if folder.exists():
        raise LearnerError(f"{folder} exists already; name a new folder, or remove it")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            _sync(path)
        unfinished.rename(folder)
        _sync(folder.parent)  # its name, too, survives a power cut
    except OSError as error:
        raise LearnerError(f"{folder} cannot be written: {error}; free space or name another folder") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
