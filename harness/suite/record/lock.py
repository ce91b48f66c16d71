"""`lock.json`: versions of programs, and digests of model, tokenizer and template. A resume needs equal digests."""

import json
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import harness
from harness.credentials import hide_secrets
from harness.errors import RunError
from harness.suite.record.config import require_equal
from harness.types import Json

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def versions() -> Json:
    """Return the versions of everything that could change a result."""
    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        # Some packages are extras.
        except PackageNotFoundError:
            packages[name] = None
    return {"harness": harness.__version__, "python": platform.python_version(), **packages}


def read_lock(path: Path) -> Json:
    """Read a lock, or return one without digests for a run interrupted early."""
    try:
        lock: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"versions": versions(), "digests": {}}
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: {error}") from error
    return lock


def note_start(lock: Json) -> Json:
    """Add this start or resume to `lock`."""
    program = Path(*sys.argv[:1])
    # Record only the name of another program: its arguments may hold secrets that we do not recognize.
    ours = program.name == "harness" or program == Path(harness.__file__).with_name("__main__.py")
    command = hide_secrets(sys.argv) if ours else [program.name]
    return {**lock, "starts": [*lock.get("starts", ()), {"at": time.time(), "command": command}]}


def note_engine(lock: Json, key: str, engines: Sequence[str], tokenizer: Path | None) -> Json:
    """Add an engine's programs and tokenizer folder, if known, under `key`."""
    noted = {**lock, "versions": versions(), "engines": lock.get("engines", {}) | {key: list(engines)}}
    if tokenizer is not None:
        noted["tokenizers"] = lock.get("tokenizers", {}) | {key: str(tokenizer.absolute())}
    return noted


def check_same_engine(before: Json, now: Json, remedy: str = "start a new run") -> None:
    """Raise `RunError` with one line per difference."""
    require_equal(before, now, f"the engine is not the one the run began with; {remedy}")
