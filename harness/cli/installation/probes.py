"""Probes of `harness doctor` for this machine, besides packages.

They start no program and contact no other machine. `harness agent doctor` checks agents, `harness engine doctor` engine
servers.
"""

import os
import platform
import shutil
import socket
import sqlite3
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import getproxies_environment, proxy_bypass

import harness
from harness.cli.installation.packages import examine_packages
from harness.cli.installation.probing import Probe, Scratch
from harness.errors import LaneError
from harness.machine.findings import Finding, Level

_LOOPBACK = "127.0.0.1"
_ANSWER_S = 2.0
_WALK_S = 2.0
"""Time to measure the cache, which may have a hundred thousand files."""
_GIB = 1 << 30
_NEEDED_BYTES = 5 * _GIB
"""Size of an engine's environment, the largest thing in the cache."""
_SKEW_S = 60.0
_SYSTEMS = frozenset({("Linux", "x86_64"), ("Linux", "aarch64")})


def _examine_python(_: Scratch) -> list[Finding]:
    version = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    return [Finding("python", Level.OK, f"{version}; harness {harness.__version__}, {Path(harness.__file__).parent}")]


def _examine_platform(_: Scratch) -> list[Finding]:
    here = (platform.system(), platform.machine())
    found = f"{platform.platform(terse=True)}, {here[1]}, {os.cpu_count()} cores"
    if here in _SYSTEMS:
        return [Finding("platform", Level.OK, found)]
    step = "these need Linux on x86_64 or aarch64; this machine can serve sessions"
    return [Finding("platform", Level.WARN, f"{found}: no agents from npm, no `harness engine up sglang|vllm`", step)]


def _examine_cache(scratch: Scratch) -> list[Finding]:
    """Check writing, space, and SQLite's log with its locks, on the cache's file system."""
    from harness.machine.cache import cache_directory

    cache = cache_directory()
    elsewhere = "point HARNESS_CACHE to a directory that can be written"
    try:
        there = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
        folder = scratch.make(there)
    except OSError as error:
        return [Finding("cache", Level.FAIL, f"{cache} cannot be written: {error.strerror or error}", elsewhere)]
    free = shutil.disk_usage(there).free
    size = f"{cache}, {_size(cache)}" if cache.exists() else f"{cache}, created when first used"
    found = f"{size}; {free / _GIB:.1f} GiB free"
    if free < _NEEDED_BYTES:
        few = f"; an engine's environment takes {_NEEDED_BYTES // _GIB} GiB"
        space = Finding("cache", Level.WARN, found + few, "free some space, or point HARNESS_CACHE elsewhere")
    else:
        space = Finding("cache", Level.OK, found)
    return [space, _examine_sqlite(folder / "sessions.db"), _examine_clock(folder)]


def _size(cache: Path) -> str:
    until, total, folders = time.monotonic() + _WALK_S, 0, [os.fspath(cache)]
    while folders and time.monotonic() < until:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:  # it is gone, or belongs to another user
            continue
    return f"{'more than ' if folders else ''}{total / _GIB:.1f} GiB used"


def _examine_sqlite(store: Path) -> Finding:
    """Check that two connections share a database with a write-ahead log, as a store and its readers do."""
    name = f"SQLite {sqlite3.sqlite_version}"
    step = "keep --store, --out and HARNESS_CACHE on a disk of this machine: file servers lack locks and shared memory"
    try:
        with closing(sqlite3.connect(store, timeout=_ANSWER_S)) as writer, closing(sqlite3.connect(store)) as reader:
            [mode] = writer.execute("PRAGMA journal_mode = WAL").fetchone()
            writer.execute("CREATE TABLE probe (value)")
            writer.execute("INSERT INTO probe VALUES (1)")
            writer.commit()
            read = reader.execute("SELECT value FROM probe").fetchall()
    except sqlite3.Error as error:
        return Finding("sqlite", Level.FAIL, f"{name}: no database in {store.parent.parent}: {error}", step)
    if mode != "wal" or read != [(1,)]:
        return Finding("sqlite", Level.FAIL, f"{name}: no write-ahead log in {store.parent.parent}, but {mode}", step)
    return Finding("sqlite", Level.OK, f"{name}, with a write-ahead log in {store.parent.parent}")


def _examine_clock(folder: Path) -> Finding:
    """Check that the clock is later than the installation, and equal to the file system's."""
    now = time.time()
    said = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
    installed = Path(harness.__file__).stat().st_mtime
    skew = folder.stat().st_mtime - now
    step = "set the clock, by NTP for example: certificates and deadlines depend on it"
    if now < installed - _SKEW_S:
        return Finding("clock", Level.WARN, f"it is {said}, before this harness was installed", step)
    if abs(skew) > _SKEW_S:
        return Finding("clock", Level.WARN, f"it is {said}; files made now are {skew:+.0f} s from it", step)
    return Finding("clock", Level.OK, said)


def _examine_tokenizer(scratch: Scratch) -> list[Finding]:
    """Check that a tokenizer opens and round-trips: the one of `harness demo`, a few kilobytes."""
    from harness.lab.models.small_tokenizer import write_small_tokenizer
    from harness.tokens.model_family import open_chat_tokenizer

    chat = open_chat_tokenizer(write_small_tokenizer(scratch.make() / "tokenizer"))
    text = "größer 猜"
    ids = chat.tokenizer.encode(text)
    if chat.tokenizer.decode(ids) != text:
        step = "pip install --force-reinstall tokenizers"
        return [Finding("tokenizer", Level.FAIL, f"{text!r} does not come back from its ids", step)]
    return [Finding("tokenizer", Level.OK, "the one of `harness demo` opens")]


def _examine_loopback(_: Scratch) -> list[Finding]:
    try:
        with (
            socket.create_server((_LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), _ANSWER_S) as client,
        ):
            server.settimeout(_ANSWER_S)
            accepted, _address = server.accept()
            with accepted:
                accepted.settimeout(_ANSWER_S)
                client.sendall(b"?")
                assert accepted.recv(1) == b"?"
    except OSError as error:
        step = "a sandbox or firewall blocks it: agents and servers of this machine talk over 127.0.0.1"
        return [Finding("loopback", Level.FAIL, f"{_LOOPBACK} cannot be listened to and reached: {error}", step)]
    return [Finding("loopback", Level.OK, f"{_LOOPBACK} can be listened to and reached")]


def examine_proxy_of(proxies: Mapping[str, str]) -> Finding:
    """Check whether `proxies`, by scheme, would catch requests to this machine. Never shows their URLs: secrets."""
    caught = [scheme for scheme in ("http", "all") if proxies.get(scheme)]
    if not caught:
        return Finding("proxy", Level.OK, "none for http")
    hosts = [host for host in (_LOOPBACK, "localhost") if not proxy_bypass(host, dict(proxies))]
    names = ", ".join(f"{scheme.upper()}_PROXY" for scheme in caught)
    if not hosts:
        return Finding("proxy", Level.OK, f"{names}, with this machine exempt")
    return Finding(
        "proxy",
        Level.WARN,
        f"{names} intercepts requests to {' and '.join(hosts)} from curl and a trainer's own clients; the harness and"
        " its agents bypass it",
        f"export NO_PROXY={_LOOPBACK},localhost",
    )


def _examine_installers(_: Scratch) -> list[Finding]:
    """Check uv, for environments of agents and engines, and npm, for agents on Node."""
    from harness.machine.uv import find_uv
    from harness.rollouts.agents.install import NODE_VERSION, agents_directory
    from harness.rollouts.agents.profile import Installer
    from harness.rollouts.agents.programs import bundled_agent, bundled_agents, bundled_profile

    try:
        found = Finding("uv", Level.OK, find_uv())
    except LaneError:
        lacks = "no uv, which installs agents and engines"
        found = Finding("uv", Level.WARN, lacks, "pip install 'session-harness[run]'")
    profiles = [bundled_profile(name) for name in bundled_agents() if bundled_agent(name).suffix == ".toml"]
    of_node = ", ".join(each.name for each in profiles if each.install.kind is Installer.NODE)
    own = agents_directory() / f"node-{NODE_VERSION}"
    npm = shutil.which("npm")
    node = f"Node {NODE_VERSION} {f'in {own}' if own.is_dir() else 'is fetched when an agent wants it'}"
    if npm:
        return [found, Finding("node", Level.OK, f"{node}; npm: {npm}")]
    step = "install Node.js with npm, any version; no other agent needs it"
    return [found, Finding("node", Level.WARN, f"no npm on PATH, which installs {of_node}", step)]


def _examine_engines(_: Scratch) -> list[Finding]:
    from harness.lab.lanes import INSTALLED
    from harness.lab.lanes.environment import Requirements, own_python, require_no_gpu

    findings = []
    for engine in INSTALLED:
        folder = Requirements.of(engine).directory
        try:
            require_no_gpu(engine)
        except LaneError as error:
            found = f"none here: {error}"
        else:
            made = f"not installed; `harness engine up {engine}` does it once, {_NEEDED_BYTES // _GIB} GiB in {folder}"
            found = f"installed in {folder}" if folder.is_dir() else made
        findings.append(Finding(f"engine {engine}", Level.OK, found))
    try:
        local = f"in {own_python()}"
    except LaneError as error:
        local = f"not installed: {error}"
    return [*findings, Finding("engine local", Level.OK, local)]


PROBES: Mapping[str, Probe] = {
    "python": _examine_python,
    "platform": _examine_platform,
    "packages": examine_packages,
    "tokenizer": _examine_tokenizer,
    "cache": _examine_cache,
    "loopback": _examine_loopback,
    "proxy": lambda _: [examine_proxy_of(getproxies_environment())],
    "installers": _examine_installers,
    "engines": _examine_engines,
}
