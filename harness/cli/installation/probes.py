"""Probes of `harness doctor` for this machine, run all at once with a time limit.

They start no program, leave nothing behind and contact no other machine. Each runs in a thread, because it may hang in
the operating system (a cache on a dead file server). The command then ends without it.
"""

import os
import platform
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import harness
from harness.errors import LaneError
from harness.machine.findings import Finding, Level

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "session-harness"

EXTRAS: Mapping[str, str] = {
    "run": "agents, engines and gateways that the harness installs; routers, shards, faults of the network",
    "local": "the local engine, on this machine's CPU or GPU",
    "learner": "`harness train` with the learner that is shipped",
    "otel": "spans for OpenTelemetry (`--otlp`)",
    "parquet": "samples as Parquet files",
    "ray": "rollouts on the nodes of a Ray cluster",
    "renderers": "model families whose chat templates rewrite history",
    "plots": "charts of `harness report --plots`",
    "tensorboard": "`--report tensorboard` of `harness train`",
    "wandb": "`--report wandb` of `harness train`",
    "trackio": "`--report trackio` of `harness train`",
}
"""Purpose of each extra; `dev` and `docs` are for contributors."""


class _Installed(NamedTuple):
    versions: list[str]
    missing: list[str]
    """Requirements without a package."""
    others: list[str]
    """Packages at another version than required."""


def examine_packages() -> list[Finding]:
    from packaging.requirements import Requirement

    try:
        stated = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        step = f"pip install {DISTRIBUTION}, or `pip install -e .` in a checkout"
        return [Finding("packages", Level.WARN, "this harness is a folder that is not installed", step)]
    all_of_them = [Requirement(each) for each in stated]
    base = _look_up(each for each in all_of_them if each.marker is None or each.marker.evaluate({"extra": ""}))
    wrong = [*(f"{each} is missing" for each in base.missing), *base.others]
    step = f"pip install --upgrade {DISTRIBUTION}" if wrong else ""
    found = "; ".join(wrong) or ", ".join(base.versions)
    findings = [Finding("packages", Level.FAIL if wrong else Level.OK, found, step)]
    for extra, purpose in EXTRAS.items():
        of_extra = [each for each in all_of_them if _is_of(each, extra)]
        findings.append(_examine_extra(extra, purpose, _look_up(of_extra)))
    return findings


def _examine_extra(extra: str, purpose: str, installed: _Installed) -> Finding:
    name, step = f"extra {extra}", f"pip install '{DISTRIBUTION}[{extra}]'"
    if installed.missing:
        return Finding(name, Level.OK, f"not installed; for {purpose}: {step}")
    if installed.others:
        return Finding(name, Level.WARN, f"for {purpose}: {'; '.join(installed.others)}", step)
    return Finding(name, Level.OK, f"{', '.join(installed.versions)}; for {purpose}")


def _is_of(requirement: "Requirement", extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _look_up(requirements: "Iterable[Requirement]") -> _Installed:
    installed = _Installed([], [], [])
    for each in requirements:
        try:
            version = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            installed.missing.append(str(each).partition(";")[0].strip())
            continue
        if each.specifier.contains(version, prereleases=True):
            installed.versions.append(f"{each.name} {version}")
        else:
            installed.others.append(f"expected {each.name}{each.specifier}, there is {version}")
    return installed


Probe = Callable[[], list[Finding]]

_LOOPBACK = "127.0.0.1"
_ANSWER_S = 2.0
_GIB = 1 << 30
_NEEDED_BYTES = 5 * _GIB
"""Size of an engine's environment, the largest thing in the cache."""
_SYSTEMS = frozenset({("Linux", "x86_64"), ("Linux", "aarch64")})


def _examine_python() -> list[Finding]:
    version = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    return [Finding("python", Level.OK, f"{version}; harness {harness.__version__}, {Path(harness.__file__).parent}")]


def _examine_platform() -> list[Finding]:
    here = (platform.system(), platform.machine())
    found = f"{platform.platform(terse=True)}, {here[1]}, {os.cpu_count()} cores"
    if here in _SYSTEMS:
        return [Finding("platform", Level.OK, found)]
    step = "these need Linux on x86_64 or aarch64; this machine can serve sessions"
    return [Finding("platform", Level.WARN, f"{found}: no agents from npm, no `harness engine up sglang|vllm`", step)]


def _examine_cache() -> list[Finding]:
    from harness.machine.cache import cache_directory

    cache = cache_directory()
    there = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        step = "point HARNESS_CACHE to a directory that can be written"
        return [Finding("cache", Level.FAIL, f"{cache} cannot be written", step)]
    free = shutil.disk_usage(there).free
    found = f"{cache}{'' if cache.exists() else ', created when first used'}; {free / _GIB:.1f} GiB free"
    if free < _NEEDED_BYTES:
        few = f"; an engine's environment takes {_NEEDED_BYTES // _GIB} GiB"
        return [Finding("cache", Level.WARN, found + few, "free some space, or point HARNESS_CACHE elsewhere")]
    return [Finding("cache", Level.OK, found)]


def _examine_loopback() -> list[Finding]:
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


def _examine_installers() -> list[Finding]:
    """Check uv, for environments of agents and engines, and npm, for agents on Node."""
    from harness.machine.program import find_uv
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


def _examine_engines() -> list[Finding]:
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
    "cache": _examine_cache,
    "loopback": _examine_loopback,
    "installers": _examine_installers,
    "engines": _examine_engines,
}


def ask_all(probes: Mapping[str, Probe], deadline_s: float) -> list[Finding]:
    """Return the findings of all `probes`, in order, within `deadline_s`. A late or broken probe becomes a finding."""
    found: dict[str, list[Finding]] = {}

    def ask(name: str, probe: Probe) -> None:
        try:
            found[name] = probe()
        except Exception as error:  # noqa: BLE001  # any error is a finding
            found[name] = [Finding(name, Level.FAIL, f"{type(error).__name__}: {error}")]

    until = time.monotonic() + deadline_s
    threads = [threading.Thread(target=ask, args=item, daemon=True, name=item[0]) for item in probes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    step = "the machine is busy, or a file system or device hangs: try again"
    late = f"no answer within {deadline_s:g} s"
    return [each for name in probes for each in found.get(name, [Finding(name, Level.WARN, late, step)])]
