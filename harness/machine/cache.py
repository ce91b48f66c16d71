"""Cache of converted models, safe against crashes, bit rot and concurrent builds.

A manifest holds a model's recipe and the size and SHA-256 of its files. Folders are renamed into place when complete. A
lock file per model admits one builder.
"""

import asyncio
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.errors import ModelError
from harness.machine.disk import hold_lock_async, sync

MANIFEST = "manifest.json"


class FetchPhase(StrEnum):
    """Phases of fetching a model, in order."""

    WAIT = "wait"
    """Another process fetches the model."""
    VERIFY = "verify"
    DOWNLOAD = "download"
    EXTRACT = "extract"
    CONVERT = "convert"


FetchProgress = Callable[[FetchPhase, int, int], None]
"""Callback of the fetching thread with the bytes done and the total, 0 if unknown: quick, and never raising."""


def silent(phase: FetchPhase, done: int, total: int) -> None:
    """Report nothing."""


def cache_directory() -> Path:
    """Return `$HARNESS_CACHE`, else `session-harness` in the user's cache directory."""
    explicit = os.environ.get("HARNESS_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "session-harness"


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yield an empty directory on `target`'s file system, then remove it. Needs the lock of `target`."""
    # A killed builder of the same target may have left its directory behind.
    prefix = f".{target.name}.staging-"
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # its installer may still be ending
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
async def building(
    target: Path, say: Callable[[str], object], *, is_there: Callable[[], bool] | None = None
) -> AsyncIterator[Path | None]:
    """Yield the path of what becomes the folder `target`, or None if it is there. Raises `ModelError` for the disk.

    Of concurrent builders one works and the others wait.
    """
    waiting = f"waiting for another process that builds {target}"
    try:
        async with hold_lock_async(target.with_name(f"{target.name}.lock"), on_wait=lambda: say(waiting)):
            if await asyncio.to_thread(is_there or target.is_dir):
                yield None
                return
            with staging(target) as scratch:
                yield scratch / "built"
                install(scratch / "built", target, scratch)
    except OSError as error:
        raise storage_error(target.parent, error) from error


def install(built: Path, target: Path, scratch: Path) -> None:
    """Move `built` to `target` durably, an old one to `scratch`."""
    for path in built.iterdir():
        sync(path)
    sync(built)
    if target.exists():
        target.rename(scratch / "replaced")
    built.rename(target)
    sync(target.parent)


def write_manifest(folder: Path, recipe: Mapping[str, Any]) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(folder.iterdir())}
    content = json.dumps({"recipe": dict(recipe), "files": files}, indent=2)
    (folder / MANIFEST).write_text(content + "\n", encoding="utf-8")


def is_intact(folder: Path, recipe: Mapping[str, Any], progress: FetchProgress) -> bool:
    """Return True if `folder` matches `recipe` and its checksums."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    if (
        not isinstance(manifest, dict)
        or manifest.get("recipe") != recipe
        or not isinstance(manifest.get("files"), dict)
    ):
        return False
    files = manifest["files"]
    total, done = sum(entry["bytes"] for entry in files.values()), 0
    for name, entry in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or sha256_of(path) != entry["sha256"]:
            return False
        done += entry["bytes"]
        progress(FetchPhase.VERIFY, done, total)
    return True


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_space(directory: Path, needed: int) -> None:
    """Raise `ModelError` if less than `needed` bytes are free."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ModelError(
            f"{directory} has {free >> 20} MiB left and {needed >> 20} MiB are needed;"
            " free some space or point HARNESS_CACHE elsewhere"
        )


def storage_error(directory: Path, error: OSError) -> ModelError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(f"no space left in {directory}; free some space or point HARNESS_CACHE elsewhere")
    return ModelError(f"cannot write to {directory} ({error}); point HARNESS_CACHE to a writable directory")
