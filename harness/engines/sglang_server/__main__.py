"""Program behind `harness engine up local`: serves the HuggingFace engine until SIGTERM or SIGINT."""

import argparse
import asyncio
import sys
from pathlib import Path

from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.engines.sglang_server.app import NativeServer
from harness.engines.sglang_server.serving import LOOPBACK, serve_in_process
from harness.errors import HarnessError
from harness.machine.asgi import stop_at_signals
from harness.tokens.tokenizer import Tokenizer

_FAILED = 1


def main() -> int:
    try:
        asyncio.run(_serve(_parse_arguments()))
    except HarnessError as error:
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201  # the last words of the program
        return _FAILED
    return 0


async def _serve(arguments: argparse.Namespace) -> None:
    provider = HuggingFaceTokenProvider(
        arguments.model_path,
        max_batch=arguments.max_running_requests,
        kv_cache_bytes=int(arguments.kv_cache_gib * 2**30),
        threads=arguments.threads,
        dtype=arguments.dtype,
        version=arguments.weight_version,
        name=arguments.served_model_name,
    )
    async with provider:
        # Until here, while weights load, these signals end the process at once.
        stop = stop_at_signals()
        tokenizer = Tokenizer.load(arguments.model_path)
        server = NativeServer(provider, tokenizer, arguments.model_path)
        async with serve_in_process(server.app(), host=arguments.host, port=arguments.port) as url:
            print(f"serving {provider.capabilities.model} at {url}", flush=True)  # noqa: T201  # what a log begins with
            await stop.wait()
            await provider.abort(None)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m harness.engines.sglang_server", allow_abbrev=False)
    parser.add_argument("--model-path", type=Path, required=True, help="HuggingFace folder")
    parser.add_argument("--served-model-name", default="", help="default: the name of the folder")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weight-version", default="0", help="label of the weights in the folder")
    parser.add_argument("--max-running-requests", type=int, default=32)
    parser.add_argument("--kv-cache-gib", type=float, default=2.0, help="bound on keys and values, in GiB")
    parser.add_argument("--threads", type=int, help="of the matrix products; default: all cores but one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
