"""Live streams: processor time of the server for each token, and how long a token takes from the engine to a client.

    python bench/streaming.py [--streams 64] [--tokens 500] [--rate 50] [--json]

The session server (with a SQLite store) and a plain proxy are processes of their own; engine and clients share this
one, so that both ends of a token are on one clock. Every stream gets `--tokens` tokens at `--rate` a second, each of
them an event of the engine. Measured are sessions with live streams, with recorded ones, and the proxy, which passes
the engine's bytes on. Wanted: at most 60 microseconds a token and three times the proxy, and from the engine's event to
the client's byte 25 ms (p50) and 60 ms (p99), gathering included.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import numpy as np
import psutil
import uvloop
from aiohttp import web

from bench.tool_loop.processes import child_process, server_process
from bench.tool_loop.stand_in import StandIn
from bench.tool_loop.words import Output
from harness.lab.models import resolve_model
from harness.tokens.tokenizer import Tokenizer

WORD = " a"  # one token; the characters that have come say how many tokens have
MOST_US, MOST_PROXIES, MOST_P50_MS, MOST_P99_MS = 60, 3, 25, 60


class Engine:
    """SGLang's wire with one event for each token, at a pace; knows when it wrote each of them."""

    def __init__(self, tokenizer: Tokenizer, tokens: int, rate: float) -> None:
        [word] = tokenizer.encode(WORD)
        ids = [word] * (tokens - 1) + [min(tokenizer.eos_ids)]
        self._stand_in = StandIn([Output(ids, [-0.5] * tokens)], [""], piece=1)
        self._rate = rate
        self.written: list[list[float]] = []
        """Of each request, in order of their arrival."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind, content = self._stand_in.answer(request.path.encode(), await request.read())
        if kind != b"text/event-stream":
            return web.Response(body=content, content_type=kind.decode(), status=200 if content else 404)
        times: list[float] = []
        self.written.append(times)
        response = web.StreamResponse(headers={"content-type": kind.decode()})
        await response.prepare(request)
        began = perf_counter()
        for number, piece in enumerate(content.split(b"\n\n")[:-1]):
            await asyncio.sleep(max(0.0, began + number / self._rate - perf_counter()))
            times.append(perf_counter())
            await response.write(piece + b"\n\n")
        return response


async def run_proxy(engine_url: str) -> None:
    """Body of the proxy's process; runs until its input closes."""

    async def forward(request: web.Request) -> web.StreamResponse:
        async with http.post(engine_url + request.path, data=await request.read()) as answer:
            response = web.StreamResponse(headers={"content-type": answer.content_type})
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        print(await listen(app), flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def listen(app: web.Application) -> str:
    """The URL of an application that answers until the process ends."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def read(http: aiohttp.ClientSession, session: str, number: int) -> list[tuple[float, int]]:
    """When how many tokens of a stream had come."""
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": f"Go, {number}."}]}
    came, characters, rest = [], 0, b""
    async with http.post(f"{session}/v1/chat/completions", json=body) as answer:
        assert answer.status == HTTPStatus.OK, await answer.text()
        async for part in answer.content.iter_any():
            *lines, rest = (rest + part).split(b"\n\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]
                    characters += len(choices[0]["delta"].get("content") or "") if choices else 0
            came.append((perf_counter(), characters // len(WORD)))
    return came


def delays(written: Sequence[float], came: Sequence[tuple[float, int]]) -> list[float]:
    """Of every token that came before the end, in seconds."""
    found: list[float] = []
    for at, count in came[:-1]:
        found += [at - each for each in written[len(found) : count]]
    return found


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    engine = Engine(Tokenizer.load(options.tokenizer), options.tokens, options.rate)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.answer)
    engine_url = await listen(app)
    tokens = options.streams * options.tokens
    found: dict[str, Any] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for way in ("live", "recorded"):
            with tempfile.TemporaryDirectory() as folder:
                shared = ("--tokenizer", str(options.tokenizer), "--directory", folder, "--engine", engine_url)
                async with server_process("sqlite", *shared) as server:
                    sessions = []
                    for _ in range(options.streams):
                        async with http.post(f"{server.url}/sessions", json={"streaming": way}) as answer:
                            sessions.append((await answer.json())["base_url"])
                    engine.written.clear()
                    cpu = server.cpu_s()
                    came = await asyncio.gather(*(read(http, each, i) for i, each in enumerate(sessions)))
                    found[f"{way}_us_per_token"] = round((server.cpu_s() - cpu) / tokens * 1e6, 1)
            if way == "live":  # streams begin together and go at one pace, so which request is whose does not matter
                pairs = zip(sorted(engine.written), sorted(came), strict=True)
                late = np.array([delay for written, each in pairs for delay in delays(written, each)]) * 1_000
                found |= {f"p{p}_ms": round(float(np.percentile(late, p)), 1) for p in (50, 99)}
        found["proxy_us_per_token"] = round(await measure_proxy(http, engine_url, options.streams) / tokens * 1e6, 1)
    found["x_proxy"] = round(found["live_us_per_token"] / found["proxy_us_per_token"], 2)
    found["holds"] = (
        found["live_us_per_token"] <= min(MOST_US, MOST_PROXIES * found["proxy_us_per_token"])
        and found["p50_ms"] <= MOST_P50_MS
        and found["p99_ms"] <= MOST_P99_MS
    )
    return found | {"streams": options.streams, "load": psutil.getloadavg()[0]}


async def measure_proxy(http: aiohttp.ClientSession, engine_url: str, streams: int) -> float:
    """Processor seconds of a proxy that passes the same streams on."""
    async with child_process(__file__, "--proxy", engine_url) as proxy:
        before = proxy.cpu_s()
        body = {"rid": "x", "input_ids": [1], "stream": True}

        async def pass_on() -> None:
            async with http.post(f"{proxy.url}/generate", data=json.dumps(body)) as answer:
                await answer.read()

        await asyncio.gather(*(pass_on() for _ in range(streams)))
        return proxy.cpu_s() - before


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second of each stream")
    parser.add_argument("--tokenizer", type=Path, help="a HuggingFace folder; by default that of SmolLM2")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--proxy", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.tokenizer = asked.tokenizer or resolve_model("smollm2-135m-instruct")
    return asked


def main() -> None:
    options = parse()
    if options.proxy is not None:
        uvloop.run(run_proxy(options.proxy))
        return
    found = uvloop.run(measure(options))
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
