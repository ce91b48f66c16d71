"""A file system that is soon full."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """One of so many megabytes at `folder`; not being able to have it is a failure in CI and a skip elsewhere."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", folder]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        reason = f"cannot mount a small tmpfs: {mounted.stderr.strip()}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
