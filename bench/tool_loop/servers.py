"""The processes of the tool loop, `python -m bench.tool_loop.servers ROLE`:

    engine   the stand-in for an engine
    proxy    uvicorn and aiohttp, which pass bytes on: what a server before an engine costs at least
    memory   a session server that keeps nothing
    sqlite   a session server with a store in a file

Each prints its URL and runs until its standard input closes.
"""

import argparse
import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
import uvloop

from bench.tool_loop.stand_in import StandIn, StandInProtocol
from bench.tool_loop.words import outputs, tool_texts
from harness.tokens.model_family import open_chat_tokenizer
from harness.tokens.tokenizer import Tokenizer
from server_patch.background import running

OUTPUT_TOKENS = 256
ROLES = ("proxy", "memory", "sqlite")


@asynccontextmanager
async def _engine(options: argparse.Namespace) -> AsyncIterator[str]:
    tokenizer = Tokenizer.load(options.tokenizer)
    tokens = options.output_tokens
    engine = StandIn(outputs(tokenizer, tokens), tool_texts(tokenizer, tokens - 40))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: StandInProtocol(engine), "127.0.0.1", 0, backlog=2048)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def _proxy(options: argparse.Namespace) -> AsyncIterator[str]:
    created = json.dumps({"base_url": ""}).encode()
    json_head = [(b"content-type", b"application/json")]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def app(scope: Any, receive: Any, send: Any) -> None:
            parts: list[bytes] = []
            more = True
            while more:
                message = await receive()
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
            content = created
            if scope["path"] != "/sessions":
                async with client.post(f"{options.engine}/v1/chat/completions", data=b"".join(parts)) as response:
                    content = await response.read()
            head = [*json_head, (b"content-length", b"%d" % len(content))]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": content})

        listener = socket.create_server(("127.0.0.1", options.port), backlog=2048)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", http="httptools")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await task


@asynccontextmanager
async def _session_server(options: argparse.Namespace) -> AsyncIterator[str]:
    """As `harness serve` runs it, logs to a file included."""
    from harness.engines.base import LogprobScale
    from harness.engines.remote.sglang import SGLangTokenProvider
    from harness.machine.this_process import raise_descriptor_limit, settle
    from harness.server.serving import SWITCH_S, serve
    from harness.server.settings import ServerSettings
    from harness.server.store.sqlite import open_store
    from harness.server.telemetry.logging import configure_logging

    sys.stderr = (options.directory / f"{options.role}.log").open("w")
    configure_logging()
    chat_tokenizer = open_chat_tokenizer(options.tokenizer)
    vocab_size = chat_tokenizer.tokenizer.vocab_size
    scale = LogprobScale.AFTER_TEMPERATURE  # stated, because the stand-in scores nothing
    engine = SGLangTokenProvider(options.engine, vocab_size=vocab_size, logprob_scale=scale)
    where = "memory" if options.role == "memory" else options.directory / "turn_overhead.db"
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_S)
    settings = ServerSettings(
        idle_page_out_s=options.idle_page_out,
        idle_ttl_s=options.idle_ttl,
        keep_closed_s=options.keep_closed,
        otlp_endpoint=options.otlp,
    )
    async with serve(engine, chat_tokenizer, open_store(where), settings) as server:
        settle()
        if options.tasks is None:
            yield server.url
            return
        async with running(_note_tasks(options.tasks)):
            yield server.url


async def _note_tasks(path: Path) -> None:
    """Say in a file how many tasks there are, again and again: nobody can ask from outside."""
    while True:
        await asyncio.to_thread(path.write_text, str(len(asyncio.all_tasks())))
        await asyncio.sleep(1)


async def _run(options: argparse.Namespace) -> None:
    runner = {"engine": _engine, "proxy": _proxy}.get(options.role, _session_server)
    async with runner(options) as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("engine", *ROLES))
    parser.add_argument("--engine", default="")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS, help="of the engine")
    parser.add_argument("--port", type=int, default=0, help="of the proxy")
    parser.add_argument("--idle-ttl", type=float, help="seconds")
    parser.add_argument("--keep-closed", type=float, help="seconds")
    parser.add_argument("--tasks", type=Path, help="a file that says how many tasks the server has")
    parser.add_argument("--idle-page-out", type=float, help="seconds, with a store in a file")
    parser.add_argument("--otlp", help="the collector that gets spans")
    uvloop.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
