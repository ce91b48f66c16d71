"""The directory of a run: which file is what, and in which order they appear.

    config.toml        the configuration, resolved; written first
    lock.json          versions and digests of what it ran with
    run.db             sessions, turns and rollouts, durable while the run goes on
    sessions/<n>/      agent.log, instruction.md and result.json of rollout n
    checkpoints/<n>/   the weights of version n, where a scenario changes them; weights.json says when and how
    faults.jsonl       a line for each time that a fault of a scenario came
    witness.json       what the engines counted, against the ledger
    samples.jsonl      the samples that a trainer gets; samples.parquet beside it when pyarrow is there
    result.json        the report; written last, so its presence says that the run is complete

Whole files are replaced atomically, so that a reader never sees half of one, whatever happens to the writer.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harness.errors import RunError
from harness.machine.disk import disk_failures
from harness.machine.locks import try_lock
from harness.samples.codec import write_samples
from harness.suite.record.config import RunConfig
from harness.types import Json, Sample

RUNS = Path("runs")

_UNFINISHED = ".unfinished"

_STAMP = r"-\d{8}-\d{6}(-\d+)?"
"""The end of a name by `new_run_path`, behind that of the suite; the suite `abort` is not `abort-often`."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run directory; the attributes are paths and say nothing about existence."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> Self:
        """A directory for a run that begins now. Raises `RunError` when there is something in it already.

        Only the configuration makes it a run: what one that was killed before had left is none.
        """
        directory = cls(path)
        taken = RunError(f"{path} exists and is not empty; choose another --out, or continue it with --resume")
        with disk_failures(path):
            if path.exists() and not directory._is_unused():
                raise taken
            directory.sessions.mkdir(parents=True, exist_ok=True)
            if directory.config.exists() and not directory.config.stat().st_size:
                directory.config.unlink()
            try:
                with directory.config.open("x", encoding="utf-8") as file:  # of two that begin at once, one has it
                    file.write(config.to_toml())
                    file.flush()
                    os.fsync(file.fileno())
            except FileExistsError:
                raise taken from None
            except OSError:
                directory.config.unlink()
                raise
        return directory

    @property
    def config(self) -> Path:
        """The configuration of the run."""
        return self.path / "config.toml"

    @property
    def lock(self) -> Path:
        """Versions and digests."""
        return self.path / "lock.json"

    @property
    def database(self) -> Path:
        """Sessions, turns and rollouts."""
        return self.path / "run.db"

    @property
    def sessions(self) -> Path:
        """Working directories of the agents."""
        return self.path / "sessions"

    @property
    def checkpoints(self) -> Path:
        """Weights that the run made, by version."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """A report on each update of the weights."""
        return self.path / "weights.json"

    @property
    def faults(self) -> Path:
        """A line for each time that a fault came."""
        return self.path / "faults.jsonl"

    @property
    def witness(self) -> Path:
        """The counts of the engines, each time that they served the run."""
        return self.path / "witness.json"

    @property
    def result(self) -> Path:
        """The report of a complete run."""
        return self.path / "result.json"

    @property
    def samples_jsonl(self) -> Path:
        """Samples, one JSON object per line."""
        return self.path / "samples.jsonl"

    @property
    def samples_parquet(self) -> Path:
        """The same samples as a table."""
        return self.path / "samples.parquet"

    @property
    def is_complete(self) -> bool:
        """The run has come to its end."""
        return self.result.is_file()

    def read_result(self) -> Json:
        """The report of a complete run. Raises `RunError` when the file holds none."""
        with disk_failures(self.result):
            content = self.result.read_bytes()
        try:
            report: Json = json.loads(content)
            return {"status": str(report["status"]), "exit_code": int(report["exit_code"])} | report
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(f"{self.result}: expected the report of a run, got something else: {error!r}") from error

    def workdir(self, number: int) -> Path:
        """The agent's working directory in rollout `number`."""
        return self.sessions / str(number)

    def clear_workdir(self, number: int) -> None:
        """Nothing is left of an earlier process that had begun rollout `number`, and was killed or interrupted."""
        shutil.rmtree(self.workdir(number), ignore_errors=True)

    @contextmanager
    def occupy(self) -> Iterator[None]:
        """Keep every other run out of this directory. Raises `RunError` when one is at work in it."""
        with disk_failures(self.config), self.config.open("rb") as file:
            if not try_lock(file):
                raise RunError(f"another run is at work in {self.path}; wait for it or stop it")
            for path in self.path.glob(f".*{_UNFINISHED}"):  # a killed run was writing them
                path.unlink()
            yield

    def write_text(self, path: Path, text: str) -> None:
        """Put `text` into `path`, all or nothing."""
        with disk_failures(path), _replacing(path) as scratch:
            scratch.write_text(text, encoding="utf-8")

    def write_json(self, path: Path, value: Json) -> None:
        """Put `value` into `path`, all or nothing."""
        self.write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_samples(self, samples: Iterable[Sample]) -> bool:
        """Export `samples`; the result says whether there is a Parquet file too."""
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
        """There is nothing but what `create` makes before the configuration is whole."""
        if not self.path.is_dir():
            return False
        rest = [path for path in self.path.iterdir() if path != self.config or path.stat().st_size]
        return not rest or (rest == [self.sessions] and not any(self.sessions.iterdir()))


def new_run_path(suite: str) -> Path:
    """Where a run of `suite` goes that was given no place: `runs/<suite>-<timestamp>`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = (RUNS / f"{_name_of(suite)}-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 100))))
    return next(path for path in candidates if not path.exists())


def latest_run(suite: str) -> RunDirectory:
    """The newest run of `suite` that is not complete. Raises `RunError` when there is none."""
    name = re.compile(re.escape(_name_of(suite)) + _STAMP)
    runs = (RunDirectory(path.parent) for path in sorted(RUNS.glob("*/config.toml"), reverse=True))
    unfinished = next((run for run in runs if name.fullmatch(run.path.name) and not run.is_complete), None)
    if unfinished is None:
        raise RunError(f"no unfinished run of {suite!r} in {RUNS}/; name its directory with --out")
    return unfinished


def _name_of(suite: str) -> str:
    return Path(suite).resolve().name or "suite"


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` when the block ends well and vanishes when it does not.

    One writer at a time: the run that occupies the directory.
    """
    scratch = path.with_name(f".{path.name}{_UNFINISHED}")
    try:
        yield scratch
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
