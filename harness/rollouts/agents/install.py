"""Environments of agents with a profile, pinned and cached. A name has the digest of all that determines it."""

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path

import msgspec

from harness.errors import AgentError
from harness.machine.cache import cache_directory, install, require_space, staging, storage_error
from harness.machine.locks import hold_lock_async
from harness.machine.program import run
from harness.machine.uv import find_uv
from harness.rollouts.agents.node import NODE_VERSION, Say, find_npm, provide_node, require_success
from harness.rollouts.agents.profile import AgentProfile, Installer

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
    try:
        if profile.install.kind is Installer.NODE:
            await provide_node(agents_directory(), say)
        # Of concurrent installers one works and the others wait. The folder is renamed when complete, so it is whole
        # even if an installer is killed.
        lock, waiting = target.with_name(f"{target.name}.lock"), f"waiting for another process that builds {target}"
        async with hold_lock_async(lock, on_wait=lambda: say(waiting)):
            if not target.is_dir():
                await _build(profile, target, say)
    except OSError as error:
        raise storage_error(target.parent, error) from error
    return target


async def _build(profile: AgentProfile, target: Path, say: Say) -> None:
    require_space(target.parent, _NEEDED_BYTES)
    say(f"installing {profile.name} {profile.version} into {target} (once)")
    with staging(target) as scratch:
        built = scratch / "built"
        # uv searches for a configuration upward from its working directory and stops here.
        (scratch / "uv.toml").touch()
        match profile.install.kind:
            case Installer.PYTHON:
                await _install_python(profile, built, target.with_name(f"{target.name}.log"))
            case Installer.NODE:
                await _install_node(profile, built, target.with_name(f"{target.name}.log"))
        await asyncio.to_thread(_make_read_only, built)
        install(built, target, scratch)


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
    # Agents work beside these files and must not edit them. Folders stay writable, so that users can delete them.
    for folder, _, files in os.walk(built):
        for path in (Path(folder, name) for name in files):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222)


async def _run(cwd: Path, log: Path, *command: str) -> None:
    # `cwd` is our own folder: the user's working directory may be an untrusted checkout with installer settings.
    ended = await run(*command, deadline_s=_INSTALL_S, cwd=cwd)
    require_success(f"{Path(command[0]).name} {command[1]}", ended, log)
