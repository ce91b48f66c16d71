"""Gateway programs, each in a cached environment. A folder is named by its requirements' digest."""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import server_patch
from harness.errors import ScenarioError
from harness.machine.cache import cache_directory, install, staging, storage_error
from harness.machine.locks import hold_lock
from harness.machine.uv import run_uv_blocking
from server_patch.router.gateway import GatewayKind

_INSTALL_S = 600.0

Say = Callable[[str], None]


class GatewayProgram(NamedTuple):
    kind: GatewayKind
    executable: Path


def gateway_program(name: str, say: Say) -> GatewayProgram:
    """Return the gateway `name`, installed if missing. Blocks. Raises `ScenarioError`, `LaneError` or `ModelError`."""
    try:
        kind = GatewayKind(name)
    except ValueError:
        raise ScenarioError(f"no gateway {name!r}; expected one of {', '.join(GatewayKind)}") from None
    requirements = Path(server_patch.__path__[0]) / "environments" / f"{kind}.txt"
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode() + requirements.read_bytes()).hexdigest()[:16]
    target = cache_directory() / "gateways" / f"{kind}-{digest}"
    try:
        lock = target.with_name(f"{target.name}.lock")
        with hold_lock(lock, on_wait=lambda: say(f"waiting for another process that installs {kind}")):
            if not target.exists():
                say(f"installing {kind} into {target} (once, about 120 MB)")
                _build(requirements, target)
    except OSError as error:
        raise storage_error(target.parent, error) from error
    return GatewayProgram(kind, target / "bin" / str(kind))


def _build(requirements: Path, target: Path) -> None:
    with staging(target) as scratch:
        built = scratch / "built"
        python = str(built / "bin" / "python")
        run_uv_blocking("venv", "--relocatable", "--python", sys.executable, str(built), deadline_s=_INSTALL_S)
        options = ("--python", python, "--requirement", str(requirements))
        run_uv_blocking("pip", "install", *options, deadline_s=_INSTALL_S)
        install(built, target, scratch)
