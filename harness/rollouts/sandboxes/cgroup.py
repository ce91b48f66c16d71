"""Limits of bwrap's processes by cgroups, version 1 or 2. They need root."""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from harness.errors import SandboxFailed
from harness.rollouts.sandboxes.spec import SandboxSpec

ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_REMOVAL_S = 2.0  # the kernel keeps a group until its last process is reaped
_POLL_S = 0.02


class Cgroup:
    """Cgroup of one box: a folder per controller (version 1) or one; none without limits."""

    def __init__(self, name: str, folders: Sequence[Path], limits: Sequence[tuple[str, str, str]] = ()) -> None:
        self.name = name
        self.folders = tuple(folders)
        self._limits = limits

    @classmethod
    def of(cls, name: str, spec: SandboxSpec) -> "Cgroup":
        """Return a group that is not created."""
        limits = _limits_v2(spec) if (ROOT / "cgroup.controllers").exists() else _limits_v1(spec)
        return cls(name, sorted({ROOT / controller / name for controller, _, _ in limits}), limits)

    def create(self) -> None:
        """Create the group. Raises `SandboxFailed`."""
        try:
            for folder in self.folders:
                folder.mkdir()
            for controller, file, value in self._limits:
                (ROOT / controller / self.name / file).write_text(value, encoding="ascii")
        except OSError as error:
            self.remove()
            raise SandboxFailed(
                f"cpus, memory_mb and pids need a writable cgroup, got {error}; run as root, or use podman"
            ) from error

    def count_killed(self) -> int:
        """Count processes that the memory limit killed."""
        for folder in self.folders:
            for file in ("memory.events", "memory.oom_control"):
                with suppress(OSError):
                    words = (folder / file).read_text(encoding="ascii").split()
                    return int(words[words.index("oom_kill") + 1])
        return 0

    def remove(self) -> None:
        """Remove the group as soon as it is empty."""
        deadline = time.monotonic() + _REMOVAL_S
        for folder in self.folders:
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(_POLL_S)


def groups_named(prefix: str) -> list[Cgroup]:
    folders: dict[str, list[Path]] = {}
    for folder in (*ROOT.glob(f"{prefix}*/"), *ROOT.glob(f"*/{prefix}*/")):
        folders.setdefault(folder.name, []).append(folder)
    return [Cgroup(name, found) for name, found in folders.items()]


def _limits_v1(spec: SandboxSpec) -> list[tuple[str, str, str]]:
    limits = []
    if spec.memory_mb is not None:
        limits.append(("memory", "memory.limit_in_bytes", str(spec.memory_mb << 20)))
    if spec.pids is not None:
        limits.append(("pids", "pids.max", str(spec.pids)))
    if spec.cpus is not None:
        limits.append(("cpu", "cpu.cfs_period_us", str(_PERIOD_US)))
        limits.append(("cpu", "cpu.cfs_quota_us", str(int(spec.cpus * _PERIOD_US))))
    return limits


def _limits_v2(spec: SandboxSpec) -> list[tuple[str, str, str]]:
    limits = []
    if spec.memory_mb is not None:
        limits.append(("", "memory.max", str(spec.memory_mb << 20)))
        limits.append(("", "memory.swap.max", "0"))
    if spec.pids is not None:
        limits.append(("", "pids.max", str(spec.pids)))
    if spec.cpus is not None:
        limits.append(("", "cpu.max", f"{int(spec.cpus * _PERIOD_US)} {_PERIOD_US}"))
    return limits
