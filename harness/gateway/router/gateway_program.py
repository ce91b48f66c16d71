"""Gateway programs, each in a cached environment. A folder is named by its requirements' digest."""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import server_patch
from harness.errors import ScenarioError
from harness.machine.cache import building, cache_directory
from harness.machine.program import run_uv
from server_patch.router.gateway import GatewayKind

_INSTALL_S = 600.0

Say = Callable[[str], None]


class GatewayProgram(NamedTuple):
    kind: GatewayKind
    executable: Path


async def gateway_program(name: str, say: Say) -> GatewayProgram:
    """Return the gateway `name`, installed if missing. Raises `ScenarioError`, `LaneError` or `ModelError`."""
    try:
        kind = GatewayKind(name)
    except ValueError:
        raise ScenarioError(f"no gateway {name!r}; expected one of {', '.join(GatewayKind)}") from None
    requirements = Path(server_patch.__path__[0]) / "environments" / f"{kind}.txt"
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode() + requirements.read_bytes()).hexdigest()[:16]
    target = cache_directory() / "gateways" / f"{kind}-{digest}"
    async with building(target, say) as built:
        if built is not None:
            say(f"installing {kind} into {target} (once, about 120 MB)")
            await run_uv("venv", "--relocatable", "--python", sys.executable, str(built), deadline_s=_INSTALL_S)
            options = ("--python", str(built / "bin" / "python"), "--requirement", str(requirements))
            await run_uv("pip", "install", *options, deadline_s=_INSTALL_S)
    return GatewayProgram(kind, target / "bin" / str(kind))
