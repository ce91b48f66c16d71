"""Lanes: spec, and the state files of running ones, which outlive the command that starts them.

The file is written before the server runs, so no server exists without one. It goes when the lane ends. The log stays
until the folder's name is used again, or many others have been made since.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import msgspec

from harness.decoding import read_json
from harness.errors import LaneError
from harness.machine.process_group import ProcessName

CONTEXT_TOKENS = 8192


class LaneEngine(StrEnum):
    """Engines that can be started here, by their names in `engines.kinds`."""

    SGLANG = "sglang"
    VLLM = "vllm"
    LOCAL = "local"
    """HuggingFace engine of the harness, over SGLang's native API."""

    @property
    def protocol(self) -> str:
        """Word before the address in `--engine`."""
        return LaneEngine.SGLANG.value if self is LaneEngine.LOCAL else self.value


INSTALLED = (LaneEngine.SGLANG, LaneEngine.VLLM)


class Dtype(StrEnum):
    FLOAT32 = "float32"
    """Format in which engines agree on logprobs to five digits."""
    BFLOAT16 = "bfloat16"
    """Format several times faster on a CPU with AMX. Each engine rounds in its own places."""


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """Engine, weights, and options that go to the server unchanged."""

    engine: LaneEngine
    model_dir: Path
    port: int | None = None
    """Loopback port. None takes a free one."""
    dtype: Dtype = Dtype.FLOAT32
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that override all others."""
    arguments: tuple[str, ...] = ()
    """Options at the end of the command line."""

    @property
    def model_name(self) -> str:
        return self.model_dir.name


_STATE = "state.json"
_LOG = "server.log"
_KEPT_FOLDERS = 20


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    engine: str
    url: str
    model: str
    model_dir: str
    dtype: str
    group: int
    """Process group, with the number of its first process."""
    processes: tuple[ProcessName, ...]
    """Processes at the time it became ready. Before, the first one."""
    is_ready: bool
    folder: str
    holder: int | None = None
    """Process id of the program whose block it serves. None if it was started to be kept."""

    @property
    def log(self) -> Path:
        return Path(self.folder) / _LOG

    @property
    def pid(self) -> int:
        return self.group

    @property
    def provider(self) -> str:
        """Value of `--engine` that names it."""
        return f"{LaneEngine(self.engine).protocol}={self.url}"

    def is_running(self) -> bool:
        return self.processes[0].is_alive()

    def owns_group(self) -> bool:
        """Return True if the process group is still this lane's."""
        return any(process.is_in(self.group) for process in self.processes)

    def to_json(self) -> dict[str, object]:
        facts = {"name": self.name, "engine": self.engine, "url": self.url, "model": self.model, "dtype": self.dtype}
        state = {"ready": self.is_ready, "holder": self.holder}
        return {**facts, "pid": self.pid, "pgid": self.group, "log": str(self.log), **state}

    def save(self) -> None:
        path = Path(self.folder) / _STATE
        written = path.with_suffix(".new")
        written.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        written.replace(path)  # all of it or nothing

    def forget(self) -> None:
        """Remove the state file. Idempotent."""
        (Path(self.folder) / _STATE).unlink(missing_ok=True)

    def ready(self, processes: tuple[ProcessName, ...]) -> "Lane":
        return replace(self, is_ready=True, processes=processes)


def new_folder(directory: Path, name: str) -> Path:
    """Return an empty folder, and remove the oldest ones of ended lanes."""
    folder = directory / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ended = [other for other in directory.iterdir() if other.is_dir() and not (other / _STATE).exists()]
    ended.sort(key=lambda other: other.stat().st_mtime, reverse=True)
    for other in ended[_KEPT_FOLDERS:]:
        shutil.rmtree(other, ignore_errors=True)
    return folder


def read_lanes(directory: Path) -> list[Lane]:
    """Return the lanes by name. Raises `LaneError` if a state file cannot be read."""
    lanes = []
    for path in directory.glob(f"*/{_STATE}"):
        try:
            lanes.append(read_json(path.read_bytes(), Lane))
        except FileNotFoundError:  # its lane has just ended
            continue
        except msgspec.DecodeError as error:
            raise LaneError(
                f"cannot read the lane in {path}: {error}; end the server of that name if it runs, then remove the file"
            ) from error
    return sorted(lanes, key=lambda lane: lane.name)
