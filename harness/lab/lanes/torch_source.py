"""Source of the CPU build of torch, which depends on the package indexes of this machine.

Three ways are tried, the cheapest first. A plain index offers the CUDA build of the same version, which vLLM's CPU
build refuses and which weighs gigabytes. It is reported, never installed.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from harness.errors import LaneError
from harness.machine.program import run
from harness.machine.uv import pip_command, try_uv

TORCH = "torch==2.13.0"
_CPU_BUILD = f"{TORCH}+cpu"
_LOOK_S = 120.0
_DOWNLOAD_S = 1200.0


async def torch_source(python: Path, wheels: Path) -> Sequence[str]:
    """Return the options by which uv finds the CPU build.

    `wheels` keeps what pip downloads. Raises `LaneError` if there is none.
    """
    probe = ("pip", "install", "--dry-run", "--no-deps", "--python", str(python))
    if (await try_uv(*probe, _CPU_BUILD, deadline_s=_LOOK_S)).code == 0:
        return ()
    # pip may be configured with folders that uv does not read. It downloads the build once, for uv.
    offered = await _ask_pip()
    if offered.endswith("+cpu"):
        options = ("--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--dest", str(wheels))
        ended = await run(*pip_command(), "download", *options, TORCH, deadline_s=_DOWNLOAD_S)
        if ended.code:
            raise LaneError(f"pip offers {_CPU_BUILD} and cannot download it: {ended.messages.strip()}")
        return ("--find-links", str(wheels))
    backend = ("--torch-backend", "cpu")
    if (await try_uv(*probe, *backend, TORCH, deadline_s=_LOOK_S)).code == 0:
        return backend
    pip_offers = f"{offered}, a CUDA build" if offered else "none"
    raise LaneError(
        f"the engines' CPU environments need {_CPU_BUILD}; pip offers {pip_offers}, and uv finds no CPU build;"
        " configure an index or a folder that has it (PIP_FIND_LINKS, UV_FIND_LINKS, UV_INDEX) and try again"
    )


async def _ask_pip() -> str:
    options = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--quiet", "--report", "-")
    asked = await run(*pip_command(), "install", *options, TORCH, deadline_s=_LOOK_S)
    if asked.code:
        return ""
    report = json.loads(asked.output)
    return str(report["install"][0]["metadata"]["version"])
