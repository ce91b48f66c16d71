"""The programs and models of a run, as they stand in `lock.json`: versions, and digests of model and template.

A run that is resumed with other weights, another tokenizer or another template would mix two models in one set of
samples; `check_same_engine` refuses that. The rest is recorded for the reader and may differ: versions, when and by
which command the run was begun and taken up, and the folder of the tokenizer that its tokens are of.
"""

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


def note_start(lock: Json) -> Json:
    """`lock`, and that the run begins now, or is taken up, by this program.

    Of a program that is not ours its name alone: which of its words are secret nobody here knows.
    """
    program = Path(*sys.argv[:1])
    ours = program.name == "harness" or program == Path(harness.__file__).with_name("__main__.py")
    command = hide_secrets(sys.argv) if ours else [program.name]
    return {**lock, "starts": [*lock.get("starts", ()), {"at": time.time(), "command": command}]}


def note_engine(lock: Json, key: str, engines: Sequence[str], tokenizer: Path | None) -> Json:
    """`lock`, with the programs of the engine that has that key and the folder of its tokenizer, None of another's."""
    noted = {**lock, "versions": versions(), "engines": lock.get("engines", {}) | {key: list(engines)}}
    if tokenizer is not None:
        noted["tokenizers"] = lock.get("tokenizers", {}) | {key: str(tokenizer.absolute())}
    return noted


def check_same_engine(before: Json, now: Json) -> None:
    """Raises `RunError` with one line per difference when `now` is another engine than `before`."""
    lines = list(differences(before, now))
    if lines:
        changes = "\n".join(f"  {line}" for line in lines)
        raise RunError(f"the engine is not the one the run began with; start a new run:\n{changes}")
