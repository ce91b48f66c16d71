"""Command line and environment of a lane's server, and what it sees of this project.

Everything is on that a session harness uses: token endpoints, abort, pause and weight updates, priorities, original
logprobs. Flags are those of SGLang 0.5.23 and vLLM 0.32.0.
"""

import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from harness._version import __version__
from harness.lab.lanes.spec import CONTEXT_TOKENS, LaneEngine, LaneSpec

LOOPBACK = "127.0.0.1"

_MAX_RUNNING = 32
_KV_TOKENS = 6 * CONTEXT_TOKENS
_KV_GIB = 2

# With these the server would import from our environment, or write no byte code and compile everything at each start.
_NOT_INHERITED = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV"})

_GUARD = "HARNESS_REPEAT_TERMINATE_"  # settings that go together: a spec with one of them inherits none

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
_LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}

# Threads that wait for each other sleep. By default they spin. If agents and tests want the same cores, a step then
# takes until the last thread is scheduled: with a load of ten on two cores both engines were five times slower.
_SHARES_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}


class ServerCommand(NamedTuple):
    arguments: Sequence[str]
    environment: Mapping[str, str]


def server_command(
    spec: LaneSpec, port: int, python: Path, import_path: Sequence[Path], parent: Mapping[str, str]
) -> ServerCommand:
    """Return the command with which `python` serves `spec` at `port`.

    `import_path` comes before installed packages. Raises `OSError` or `ValueError` if the model folder has no readable
    `config.json`.
    """
    how = _STARTED[spec.engine]
    stated = {name for name in parent if name.startswith(_GUARD) and any(key.startswith(_GUARD) for key in spec.env)}
    inherited = {name: value for name, value in parent.items() if name not in _NOT_INHERITED | stated}
    # torch gives its compiler the header paths unquoted, so nothing compiles in a path with a space.
    has_space = any(character.isspace() for character in str(python))
    compiles = {"TORCHDYNAMO_DISABLE": "1"} if has_space else {}
    path = {"PYTHONPATH": ":".join(str(folder) for folder in import_path)}
    switches = {**_OFFLINE, **_LOOPBACK_ONLY, **_SHARES_CORES, **how.environment, **compiles}
    return ServerCommand(
        (str(python), "-m", *how.arguments(spec, port), *spec.arguments), {**inherited, **switches, **path, **spec.env}
    )


_SGLANG_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Sampled logprobs on the scale of prompt logprobs: before the temperature.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    # /health would generate a token, which a paused server cannot do: it would be taken for dead.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}


def _sglang_arguments(spec: LaneSpec, port: int) -> list[str]:
    return [
        "sglang.launch_server",
        *("--model-path", str(spec.model_dir.absolute()), "--served-model-name", spec.model_name),
        *("--host", LOOPBACK, "--port", str(port)),
        *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--grammar-backend", "xgrammar", "--dtype", spec.dtype),
        *("--context-length", str(context_tokens(spec.model_dir))),
        *("--max-total-tokens", str(_KV_TOKENS), "--max-running-requests", str(_MAX_RUNNING)),
        # Graphs cost more time than they save on a small model.
        *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
        "--disable-overlap-schedule",
        "--sleep-on-idle",  # otherwise its scheduler keeps a core busy doing nothing
        "--skip-server-warmup",  # a lane is ready when it has generated a token, which warms it up
        "--enable-priority-scheduling",
        "--enable-custom-logit-processor",
        "--enable-metrics",
    ]


_VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, abort by id, weight updates
    "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),  # GiB; with --enforce-eager an explicit size skips the profiling run
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # of two cores it would keep one for the API server
    "VLLM_HOST_IP": LOOPBACK,
    "VLLM_NO_USAGE_STATS": "1",
}


def _vllm_arguments(spec: LaneSpec, port: int) -> list[str]:
    return [
        "vllm.entrypoints.cli.main",
        "serve",
        str(spec.model_dir.absolute()),
        *("--served-model-name", spec.model_name),
        *("--host", LOOPBACK, "--port", str(port)),
        *("--dtype", spec.dtype, "--max-model-len", str(context_tokens(spec.model_dir))),
        *("--max-num-seqs", str(_MAX_RUNNING)),
        "--enforce-eager",
        *("--scheduling-policy", "priority"),
        "--enable-scale-out",  # the token endpoint
        "--enable-request-id-headers",
        "--enable-prompt-tokens-details",  # cached tokens
    ]


def _local_arguments(spec: LaneSpec, port: int) -> list[str]:
    return [
        "harness.engines.sglang_server",
        *("--model-path", str(spec.model_dir.absolute()), "--served-model-name", spec.model_name),
        *("--host", LOOPBACK, "--port", str(port)),
        *("--dtype", spec.dtype, "--max-running-requests", str(_MAX_RUNNING), "--kv-cache-gib", str(_KV_GIB)),
    ]


class _HowToStart(NamedTuple):
    arguments: Callable[[LaneSpec, int], list[str]]
    environment: Mapping[str, str] = {}


# The "how to start" column of `engines.kinds`. It stands here because engines may not know of lanes.
_STARTED: Mapping[LaneEngine, _HowToStart] = {
    LaneEngine.SGLANG: _HowToStart(_sglang_arguments, _SGLANG_ENVIRONMENT),
    LaneEngine.VLLM: _HowToStart(_vllm_arguments, _VLLM_ENVIRONMENT),
    LaneEngine.LOCAL: _HowToStart(_local_arguments),
}


def context_tokens(model_dir: Path) -> int:
    """Return the context length that the server gets."""
    config = json.loads((model_dir / "config.json").read_bytes())
    return min(CONTEXT_TOKENS, int(config.get("max_position_embeddings", CONTEXT_TOKENS)))


DISTRIBUTION = "session-harness"

EntryPoints = Mapping[str, Mapping[str, str]]

# Declared here and not in the distribution: a server that other programs use must not have `force_tokens`, and one with
# a GPU or cores of its own does not want `sglang_cpu` or `vllm_cpu`.
_OF_LANES: EntryPoints = {
    "sglang.srt.plugins": {
        "harness_cpu": "server_patch.sglang_cpu:register",
        "harness_force_tokens": "server_patch.force_tokens.sglang_plugin:register",
    },
    "vllm.general_plugins": {"harness_waiting": "server_patch.vllm_cpu.waiting:register"},
    "vllm.logits_processors": {"harness_force_tokens": "server_patch.force_tokens.vllm_processor:ForceTokens"},
}


def write_overlay(engine: LaneEngine, folder: Path) -> list[Path]:
    """Fill the new folder `folder` and return the import path of a server.

    It links to `server_patch` and has the distribution metadata by which SGLang and vLLM find plugins. So environments
    stay as installed, and a lane runs the code of the harness that started it.
    """
    folder.mkdir(parents=True)
    (folder / "server_patch").symlink_to(server_patch(), target_is_directory=True)
    distribution = folder / f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {__version__}\n")
    declared, sections = _read_entry_points(), []
    for group in sorted({*declared, *_OF_LANES}):
        points = {**declared.get(group, {}), **_OF_LANES.get(group, {})}
        sections.append(f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in sorted(points.items())))
    (distribution / "entry_points.txt").write_text("\n".join(sections))
    stand_ins = [server_patch() / "sglang_cpu" / "path"] if engine is LaneEngine.SGLANG else []
    return [*stand_ins, folder]


def own_import_path(parent: Mapping[str, str]) -> list[Path]:
    """Return the import path of the local engine's server."""
    inherited = parent.get("PYTHONPATH", "").split(os.pathsep)
    return [server_patch().parent, *(Path(folder).absolute() for folder in inherited if folder)]


def server_patch() -> Path:
    spec = find_spec("server_patch")
    assert spec is not None, "one distribution ships both packages"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _read_entry_points() -> EntryPoints:
    project = server_patch().parent / "pyproject.toml"
    if project.is_file():  # a checkout, whose entry points are newer than an install's
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        if table["name"] == DISTRIBUTION:
            return dict(table.get("entry-points", {}))
    groups: dict[str, dict[str, str]] = {}
    for point in metadata.distribution(DISTRIBUTION).entry_points:
        groups.setdefault(point.group, {})[point.name] = point.value
    return groups
