"""What sessions cost that somebody creates and leaves: time and memory, until they are given back.

    python bench/many_sessions.py [--json] [--sessions 100000]

A session server in a process of its own, on a SQLite store, with the settings of `harness serve` (24 hours idle, closed
rows kept for 30 days) and a clock that this process moves. Printed: what creating them costs, what a restart that
restores them costs, what the server looks like once nobody has asked for them for a day, how long the longest answer
took meanwhile, and what is left of the rows after a month.
"""

import argparse
import asyncio
import json
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import psutil
import uvloop

THIS = Path(__file__).resolve()
ROOT = THIS.parent.parent
MIB = 1 << 20
DAY_S = 86_400
AT_ONCE = 64


async def run_server(directory: Path) -> None:
    """Body of the server's process: prints its URL; every line of its input moves the clock by so many seconds."""
    import time

    from harness.engines.scripted import ScriptedEngine
    from harness.server.serving import serve
    from harness.server.settings import ServerSettings
    from harness.store.sqlite import SQLiteStore
    from harness.telemetry.logging import configure_logging
    from harness.tokens.model_family import open_chat_tokenizer

    configure_logging("error")
    from tests.toy_model import write_toy_model

    moved = 0.0

    def clock() -> float:
        return time.time() + moved

    chat_tokenizer = open_chat_tokenizer(write_toy_model(directory / "toy"))
    settings = ServerSettings(idle_ttl_s=DAY_S, keep_closed_s=30 * DAY_S)
    store = SQLiteStore(directory / "bench.db", clock=clock)
    async with serve(ScriptedEngine(chat_tokenizer.tokenizer), chat_tokenizer, store, settings, clock=clock) as running:
        print(running.url, running.restored, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            moved += float(line)


class Server:
    """The server's process and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process, http: aiohttp.ClientSession, restored: int) -> None:
        self._process = process
        self._stats = psutil.Process(process.pid)
        self.http = http
        self.restored = restored

    @property
    def memory_mib(self) -> int:
        """Resident."""
        return round(self._stats.memory_info().rss / MIB)

    def wait_s(self, seconds: float) -> None:
        """Let so much time pass for the server."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n".encode())

    async def sessions(self) -> int:
        """How many it holds."""
        async with self.http.get("/metrics") as answer:
            page = await answer.text()
        return int(
            float(next(line for line in page.splitlines() if line.startswith("harness_sessions_open ")).split()[1])
        )


@asynccontextmanager
async def server(directory: Path) -> AsyncIterator[Server]:
    """A server on the store in `directory`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, THIS, "--serve", directory, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url, restored = (await process.stdout.readline()).decode().split()
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=AT_ONCE)) as http:
            yield Server(process, http, int(restored))
    finally:
        process.stdin.close()
        await process.wait()


async def create(http: aiohttp.ClientSession, count: int) -> None:
    """Create so many sessions, and leave them."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            body = {"metadata": {"prompt": number}, "limits": {"turns": 50}}
            async with http.post("/sessions", json=body) as answer:
                answer.raise_for_status()
                await answer.read()

    async with asyncio.TaskGroup() as workers:
        for _ in range(AT_ONCE):
            workers.create_task(work())


async def until_none_is_held(there: Server) -> tuple[float, float]:
    """Seconds until the server holds no session, and those of the longest answer meanwhile."""
    began, longest = perf_counter(), 0.0
    while True:
        asked = perf_counter()
        held = await there.sessions()
        longest = max(longest, perf_counter() - asked)
        if not held:
            return perf_counter() - began, longest
        await asyncio.sleep(0.01)


async def until_rows_are_gone(database: Path) -> float:
    """Seconds until the store has no session any more."""
    began = perf_counter()
    with closing(sqlite3.connect(database)) as connection:
        while connection.execute("SELECT 1 FROM sessions LIMIT 1").fetchone():  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.5)
    return perf_counter() - began


async def main(sessions: int) -> dict[str, Any]:
    """Create, restart, wait a day, create again, wait a month."""
    figures: dict[str, Any] = {"sessions": sessions}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        database = directory / "bench.db"
        async with server(directory) as there:
            figures["empty_mib"] = there.memory_mib
            began = perf_counter()
            await create(there.http, sessions)
            figures["created_s"] = round(perf_counter() - began, 1)
            figures["held_mib"] = there.memory_mib
        figures["store_mib"] = round(database.stat().st_size / MIB)
        began = perf_counter()
        async with server(directory) as there:
            figures["restart_s"] = round(perf_counter() - began, 1)
            figures["restored"] = there.restored
            figures["restored_mib"] = there.memory_mib
            there.wait_s(DAY_S)
            seconds, longest = await until_none_is_held(there)
            figures |= {"expired_s": round(seconds, 1), "longest_answer_s": round(longest, 3)}
            figures["expired_mib"] = there.memory_mib
            await create(there.http, sessions)
            figures["held_again_mib"] = there.memory_mib
            there.wait_s(DAY_S)
            await until_none_is_held(there)
            figures["expired_again_mib"] = there.memory_mib
        began = perf_counter()
        async with server(directory) as there:
            figures |= {"restart_after_s": round(perf_counter() - began, 1), "restored_after": there.restored}
            figures["restored_after_mib"] = there.memory_mib
            there.wait_s(40 * DAY_S)
            figures["rows_gone_s"] = round(await until_rows_are_gone(database), 1)
    return figures


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    asked = parse()
    if asked.serve:
        uvloop.run(run_server(asked.serve))
    else:
        found = uvloop.run(main(asked.sessions))
        print(json.dumps(found) if asked.json else "\n".join(f"{name:20} {value}" for name, value in found.items()))
