"""The programs and models of a run, as they stand in `lock.json`: versions, and digests of model and template.

A run that is resumed with other weights, another tokenizer or another template would mix two models in one set of
samples; `check_same_engine` refuses that. Versions are recorded for the reader and may differ.
"""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import harness
from harness.errors import RunError
from harness.suite.record.config import differences
from harness.types import Json

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def versions() -> Json:
    """Versions of everything that could change a result."""
    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {"harness": harness.__version__, "python": platform.python_version(), **packages}


def read_lock(path: Path) -> Json:
    """The lock in `path`; one without digests when the run was interrupted before it had one."""
    try:
        lock: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"versions": versions(), "digests": {}}
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: {error}") from error
    return lock


def check_same_engine(before: Json, now: Json) -> None:
    """Raises `RunError` with one line per difference when `now` is another engine than `before`."""
    lines = list(differences(before, now))
    if lines:
        changes = "\n".join(f"  {line}" for line in lines)
        raise RunError(f"the engine is not the one the run began with; start a new run:\n{changes}")
