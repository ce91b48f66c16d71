"""Command line and environment of a lane's server, from its spec alone.

Everything is on that a session harness uses: token endpoints, abort, pause and weight updates, priorities, original
logprobs. Flags are those of SGLang 0.5.23 and vLLM 0.32.0.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
