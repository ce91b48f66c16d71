"""What collecting costs those who are still talking: the latency of running sessions, with a collector and without.

    python bench/collecting_beside.py [--json] [--finished 1000] [--tokens 30000] [--running 32]

A session server in a process of its own has finished sessions in its store, and running ones that take a short turn
every half second, with an engine that answers at once: what they wait for is the server. First nobody else asks. Then
a collector, in a process of its own, reads the samples of every finished session, 64 at a time, as a rollout manager
does. Printed are the latencies of both times and what the collector raised the p99 by.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import psutil
import uvloop

from bench.collecting import copy_session, write_one_session
from bench.tool_loop.bars import Bar
from bench.tool_loop.processes import child_process
from harness.rollouts.client.session_server import SessionServerClient

THIS = Path(__file__).resolve()

_AT_ONCE = 64
_ALONE_S = 20.0
_TURNS = 50
_EVERY_S = 0.5
_MOST = 1.2


async def collect(url: str) -> None:
    """Body of the collector's process: reads every session that its standard input names, and says when it is done."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def read(client: SessionServerClient, session_id: str) -> int:
        async with places:
            return sum(sample.tokens.size for sample in (await client.collect(session_id)).samples)

    async with SessionServerClient(url) as client:
        ids = (await asyncio.to_thread(sys.stdin.read)).split()
        print(sum(await asyncio.gather(*(read(client, each) for each in ids))), flush=True)


async def converse(url: str, seconds: list[float], over: asyncio.Event) -> None:
    """Sessions of so many turns, one after another, until it is over; notes how long each turn took."""
    async with aiohttp.ClientSession(url) as http:
        while not over.is_set():
            async with http.post("/sessions", json={}) as answer:
                session = await answer.json()
            messages: list[Any] = []
            for _ in range(_TURNS):
                await asyncio.sleep(random.uniform(0, 2 * _EVERY_S))
                if over.is_set():
                    return
                messages.append({"role": "user", "content": "q" * 400})
                began = perf_counter()
                path, key = f"/sessions/{session['session_id']}/v1/chat/completions", session["api_key"]
                body = {"model": "m", "messages": messages}
                async with http.post(path, json=body, headers={"authorization": f"Bearer {key}"}) as answer:
                    message = (await answer.json())["choices"][0]["message"]
                seconds.append(perf_counter() - began)
                messages.append(message)


def latencies(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[int(len(ordered) * 0.99)] * 1e3
    return {"turns": len(ordered), "p50_ms": round(statistics.median(ordered) * 1e3, 1), "p99_ms": round(p99, 1)}


async def measure(url: str, running: int, ids: list[str]) -> dict[str, Any]:
    seconds: list[float] = []
    over = asyncio.Event()
    talkers = [asyncio.create_task(converse(url, seconds, over)) for _ in range(running)]
    await asyncio.sleep(5)
    seconds.clear()
    await asyncio.sleep(_ALONE_S)
    alone = latencies(seconds)
    seconds.clear()
    began = perf_counter()
    pipe = asyncio.subprocess.PIPE
    collector = await asyncio.create_subprocess_exec(sys.executable, THIS, "--collect", url, stdin=pipe, stdout=pipe)
    tokens, _ = await collector.communicate(" ".join(ids).encode())
    took = perf_counter() - began
    beside = latencies(seconds)
    over.set()
    await asyncio.gather(*talkers)
    raised = round(beside["p99_ms"] / alone["p99_ms"], 2)
    return {"alone": alone, "beside": beside, "raised": raised, "collect_s": round(took, 1), "tokens": int(tokens)}


async def main(asked: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        await write_one_session(directory, 50, asked.tokens)
        ids = copy_session(directory / "bench.db", asked.finished)
        async with child_process(THIS.with_name("collecting.py"), "--serve", directory) as server:
            figures = await measure(server.url, asked.running, ids)
            figures["load"] = psutil.getloadavg()[0]
    if asked.json:
        print(json.dumps(figures))
        return
    for name in ("alone", "beside"):
        print(f"{name:7} {figures[name]}")
    print(f"{asked.finished} sessions, {figures['tokens']} tokens, read in {figures['collect_s']} s")
    print(f"load of the machine: {figures['load']:.0f}")
    print(Bar("p99 beside a collector, by that alone", figures["raised"], _MOST))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finished", type=int, default=1_000)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--collect", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    uvloop.run(collect(options.collect) if options.collect else main(options))
