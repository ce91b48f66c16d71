"""bubblewrap: namespaces over this machine's system, read-only. Each command gets a fresh box with the workdir.

Its limits are cgroups, version 1 or 2, which need root.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path

from harness.errors import SandboxFailed
from harness.machine.deadlines import to_the_end
from harness.rollouts.sandboxes.sandbox import Place, RunningCommand, StartOnHost, call, describe_full_disk
from harness.rollouts.sandboxes.spec import Mount, SandboxSpec

ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_REMOVAL_S = 2.0  # the kernel keeps a group until its last process is reaped
_POLL_S = 0.02

_START_S = 20.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
# The rest of /etc may hold secrets of this machine.
_SETTINGS = (
    *("passwd", "group", "nsswitch.conf", "hosts", "resolv.conf", "services", "protocols", "localtime", "mime.types"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ca-certificates", "os-release"),
    *("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/tls/openssl.cnf", "pki/ca-trust"),
)
_TMP_BYTES = 1 << 30
# Root of the box is this machine's root without capabilities, if the harness runs as root, and owns these files. The
# lists are the container runtimes'.
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_HIDDEN = ("/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/kmsg", "/proc/mtrr", "/proc/scsi", "/proc/timer_list")

# The first process of the group becomes bwrap. It joins the cgroup, and ignores the signals that ask an agent to end:
# they reach the whole group, and bwrap's own end would kill the agent before it could obey.
_ENTER = 'trap "" TERM INT HUP; for group in $1; do echo $$ >"$group/cgroup.procs" || exit 125; done; shift; exec "$@"'
_OBEY = ("/usr/bin/env", "--default-signal=TERM,INT,HUP")


class BwrapSandbox:
    def __init__(self, spec: SandboxSpec, place: Place) -> None:
        self._spec = spec
        self._place = place
        self._group = Cgroup.of(place.name, spec)
        self.has_own_network = not spec.network

    async def start(self) -> None:
        # A trial, because bwrap exits with 1 if the box cannot be made, as an agent may.
        command = ("bwrap", *self._options(), "--", *_OBEY, "/bin/true")
        trial = await call(*command, deadline_s=_START_S, env={"PATH": os.environ.get("PATH", os.defpath)})
        if trial.code:
            raise SandboxFailed(f"bwrap cannot make the sandbox: {trial.messages.strip()[-500:]}")
        await to_the_end(asyncio.to_thread(self._group.create))  # else an abort's `stop` would come before its folders

    async def exec(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, on_host: StartOnHost
    ) -> RunningCommand:
        folders = " ".join(map(str, self._group.folders))
        entered = ("/bin/sh", "-c", _ENTER, "sh", folders, shutil.which("bwrap") or "bwrap")
        boxed = (*entered, *self._options(), "--chdir", str(cwd), "--", *_OBEY, *command)
        return await on_host(boxed, env, self._place.folder)

    async def put(self, source: Path, target: Path) -> None:
        await asyncio.to_thread(self._put, source, target)

    async def get(self, source: Path, target: Path) -> None:
        await asyncio.to_thread(self._get, source, target)

    async def find_failure(self) -> str | None:
        if await asyncio.to_thread(self._group.count_killed):
            return f"the memory limit of {self._spec.memory_mb} MB killed it; set a larger memory_mb"
        return await asyncio.to_thread(describe_full_disk, self._place.workdir)

    async def stop(self) -> None:
        await asyncio.to_thread(self._group.remove)

    def _options(self) -> Iterator[str]:
        spec, place = self._spec, self._place
        yield from ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
        yield from ("--die-with-parent", "--disable-userns", "--cap-drop", "ALL", "--hostname", "sandbox")
        # No `--new-session`: the group has a session of its own without a terminal, and signals reach the agent by it.
        if self.has_own_network:
            yield "--unshare-net"
        uid, _, gid = (spec.user or f"{os.getuid()}:{os.getgid()}").partition(":")
        yield from ("--uid", uid, "--gid", gid or uid)
        yield from _show_system()
        for program in place.programs:
            yield from ("--ro-bind", str(program), str(program))
        for mount in self._mounts:
            yield from ("--bind" if mount.is_writable else "--ro-bind", str(mount.source), mount.target)
        yield from ("--ro-bind", str(place.folder), str(place.folder), "--remount-ro", "/")

    @property
    def _mounts(self) -> list[Mount]:
        workdir = Mount(self._place.workdir, str(self._place.workdir), is_writable=True)
        return sorted((*self._spec.shown, workdir), key=lambda mount: len(Path(mount.target).parts))

    def _put(self, source: Path, target: Path) -> None:
        mount, path = self._find_on_host(target)
        if not mount.is_writable or _real(path.parent) != path.parent:
            raise SandboxFailed(f"expected a path in the workdir or a mount with `rw`, not behind a link, got {target}")
        _copy(source, path)

    def _get(self, source: Path, target: Path) -> None:
        mount, path = self._find_on_host(source)
        real = _real(path)
        if not real.is_relative_to(_real(mount.source)):
            raise SandboxFailed(f"expected a path in the workdir or a mount, got {source}, a link to elsewhere")
        _copy(real, target)

    def _find_on_host(self, path: Path) -> tuple[Mount, Path]:
        """Return the mount with `path` of the box, and its path on this machine, which an agent's links may be in."""
        for mount in reversed(self._mounts):
            if path.is_relative_to(mount.target) and ".." not in path.parts:
                return mount, _real(mount.source) / path.relative_to(mount.target)
        raise SandboxFailed(f"expected a path in the workdir or a mount, got {path}: nothing else of bwrap lasts")


def _show_system() -> Iterator[str]:
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for name in _SETTINGS:
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
    yield from ("--proc", "/proc", "--dev", "/dev")
    for name in _READ_ONLY:
        yield from ("--ro-bind-try", name, name)
    for path in map(Path, _HIDDEN):
        if path.is_dir():
            yield from ("--tmpfs", str(path), "--remount-ro", str(path))
        elif path.exists():
            yield from ("--ro-bind", "/dev/null", str(path))
    for folder in ("/tmp", "/var/tmp", "/run"):  # noqa: S108  # of the box
        yield from ("--size", str(_TMP_BYTES), "--tmpfs", folder)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # `Path.resolve` fails on links in a circle


def _copy(source: Path, target: Path) -> None:
    try:
        for path in (source, *source.rglob("*")):
            _make_room(path, target / path.relative_to(source))
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    except (OSError, RecursionError, shutil.Error) as error:
        raise SandboxFailed(f"{source} cannot be copied to {target}: {error}") from error


def _make_room(source: Path, target: Path) -> None:
    # Into a link that an agent left, the copy would go elsewhere.
    if target.is_symlink() or not target.is_dir():
        target.unlink(missing_ok=True)
    elif not source.is_dir():
        shutil.rmtree(target)


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
    for folder in (f"{ROOT}/{prefix}*/", f"{ROOT}/*/{prefix}*/"):
        for found in map(Path, glob(folder)):  # noqa: PTH207  # `Path.glob` raises if another group goes away meanwhile
            folders.setdefault(found.name, []).append(found)
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
