"""Files of a run directory, in order of appearance.

    config.toml        resolved configuration; written first
    lock.json          starts, versions, and digests of model, tokenizer and template, which a resume needs equal
    run.db             sessions, turns and rollouts, always durable
    sessions/<n>/      agent.log, instruction.md and result.json of rollout n
    trials/<n>/        logs, tests, reward and Harbor result of rollout n of a Harbor task
    checkpoints/<n>/   weights of version n; weights.json reports updates
    faults.jsonl       one line per firing
    audit.json         causes of the gap between engine and trainer
    witness.json       the engines' token counts, against the ledger
    samples.jsonl      samples for a trainer; with pyarrow also samples.parquet
    result.json        report; written last, so it marks a complete run

Whole files are replaced atomically: no reader ever sees half a file.
"""

import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import harness
from harness.credentials import hide_secrets
from harness.errors import RunError
from harness.machine.disk import disk_failures, sync, try_lock
from harness.samples.codec import write_samples
from harness.suite.record.config import RunConfig, require_equal
from harness.types import Json, Sample

RUNS = Path("runs")

_UNFINISHED = ".unfinished"

_STAMP = r"-\d{8}-\d{6}(-\d+)?"
"""Suffix added by `new_run_path`; tells suite `abort` from `abort-often`."""


class _Inside:
    """Path of one name in the run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDirectory", _: object) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of a run directory; the files may not exist."""

    path: Path

    config = _Inside("config.toml")
    lock = _Inside("lock.json")
    database = _Inside("run.db")
    sessions = _Inside("sessions")
    """Agents' working directories."""
    checkpoints = _Inside("checkpoints")
    weights = _Inside("weights.json")
    audit = _Inside("audit.json")
    faults = _Inside("faults.jsonl")
    witness = _Inside("witness.json")
    result = _Inside("result.json")
    samples_jsonl = _Inside("samples.jsonl")
    samples_parquet = _Inside("samples.parquet")

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> Self:
        """Create a new run's directory, or finish an unfinished `create`. Raises `RunError` when it is not empty."""
        directory = cls(path)
        taken = RunError(f"{path} exists and is not empty; choose another --out, or continue it with --resume")
        with disk_failures(path):
            if path.exists() and not directory._is_unused():
                raise taken
            directory.sessions.mkdir(parents=True, exist_ok=True)
            if directory.config.exists() and not directory.config.stat().st_size:
                directory.config.unlink()
            try:
                # "x" lets only one of two concurrent runs create the file.
                with directory.config.open("x", encoding="utf-8") as file:
                    file.write(config.to_toml())
                    file.flush()
                    os.fsync(file.fileno())
            except FileExistsError:
                raise taken from None
            # A half-written configuration would make this directory a run.
            except OSError:
                directory.config.unlink()
                raise
        return directory

    @property
    def is_complete(self) -> bool:
        return self.result.is_file()

    def read_result(self) -> Json:
        """Read the report. Raises `RunError` when it is not one."""
        with disk_failures(self.result):
            content = self.result.read_bytes()
        try:
            report: Json = json.loads(content)
            return {"status": str(report["status"]), "exit_code": int(report["exit_code"])} | report
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(f"{self.result}: expected the report of a run, got something else: {error!r}") from error

    def workdir(self, number: int) -> Path:
        return self.sessions / str(number)

    def trial(self, number: int) -> Path:
        """Return the folder of what a task's sandbox shows, next to the agent's directory."""
        return self.path / "trials" / str(number)

    @contextmanager
    def occupy(self) -> Iterator[None]:
        """Lock the directory. Raises `RunError` when another run holds it."""
        with disk_failures(self.config), self.config.open("rb") as file:
            if not try_lock(file):
                raise RunError(f"another process uses the run {self.path}; wait for it or stop it")
            for path in self.path.glob(f".*{_UNFINISHED}"):  # left by a killed run
                path.unlink()
            yield

    def write_text(self, path: Path, text: str) -> None:
        with disk_failures(path), _replacing(path) as scratch:
            scratch.write_text(text, encoding="utf-8")

    def write_json(self, path: Path, value: Json) -> None:
        self.write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_samples(self, samples: Iterable[Sample]) -> bool:
        """Export `samples`. Returns True if Parquet was written too."""
        with disk_failures(self.samples_jsonl), _replacing(self.samples_jsonl) as scratch:
            write_samples(samples, scratch)
        try:
            from harness.samples.codec import write_parquet

            with disk_failures(self.samples_parquet), _replacing(self.samples_parquet) as scratch:
                write_parquet(samples, scratch)
        except ImportError:  # pyarrow is an extra
            return False
        return True

    def _is_unused(self) -> bool:
        if not self.path.is_dir():
            return False
        rest = [path for path in self.path.iterdir() if path != self.config or path.stat().st_size]
        return not rest or (rest == [self.sessions] and not any(self.sessions.iterdir()))


def new_run_path(suite: str) -> Path:
    """Return `runs/<suite>-<timestamp>`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = (RUNS / f"{_name_of(suite)}-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 100))))
    return next(path for path in candidates if not path.exists())


def latest_run(suite: str) -> RunDirectory:
    """Return the newest incomplete run. Raises `RunError` when there is none."""
    name = re.compile(re.escape(_name_of(suite)) + _STAMP)
    runs = (RunDirectory(path.parent) for path in sorted(RUNS.glob("*/config.toml"), reverse=True))
    unfinished = next((run for run in runs if name.fullmatch(run.path.name) and not run.is_complete), None)
    if unfinished is None:
        raise RunError(f"no unfinished run of {suite!r} in {RUNS}/; name its directory with --out")
    return unfinished


def newest_run() -> Path:
    """Return the run of `runs/` that began last. Raises `RunError` when there is none."""
    begun = {path.parent: path.stat().st_mtime for path in RUNS.glob("*/config.toml")}
    if not begun:
        raise RunError(
            f"expected a run in {RUNS}/, found none; `harness run` makes one, `harness view DIR` shows others"
        )
    return max(begun, key=begun.__getitem__)


def _name_of(suite: str) -> str:
    return Path(suite).resolve().name or "suite"


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a scratch path that replaces `path` on success. Single writer: the run that occupies the directory."""
    scratch = path.with_name(f".{path.name}{_UNFINISHED}")
    try:
        yield scratch
        # Sync before the rename, or a crash could leave an empty file under the final name.
        sync(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


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
