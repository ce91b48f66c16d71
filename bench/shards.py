"""What shards cost: CPU per turn of two behind a front, beside two servers that know nothing of each other, and one.

    python bench/shards.py [--json] [--shards 2] [--sessions 16] [--turns 12] [--rounds 5]

All serve conversations of an engine that costs nothing, by real processes and sockets, as many at each process. CPU
time is what the system has booked on the processes. Two busy processes take more of it per turn than one by itself
where they share a core's parts or a busy machine; so the ratio is to as many servers without a front. The front's CPU
is taken with turns and for as long without any: the difference is what turns cost it.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import aiohttp

from bench.tool_loop.processes import ServerProcess, cpu_s, harness_server
from tests.toy_model import write_toy_model

ANSWER = "The answer to that is forty-two, as everybody knows."
WARM_UP = 2
QUESTION = "And what would you say about the following matter, number {}, which is of some length?"


@dataclass
class Measured:
    """One server, several, or shards: what they have done and used so far."""

    name: str
    servers: Sequence[ServerProcess]
    """The one that was started first, first: of shards the front."""
    sessions: Sequence[dict[str, str]]
    turns: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    first_cpu_s: float = 0.0
    first_idle_cpu_s: float = 0.0
    """The same for as long, without turns."""

    @property
    def cpu_ms_per_turn(self) -> float:
        return 1000 * self.cpu_s / self.turns

    async def run(self, http: aiohttp.ClientSession, turns: int) -> None:
        """So many turns of each session at once; then as long without any."""
        first = self.servers[0].process
        all_before, first_before, began = self._cpu_s(), cpu_s(first), perf_counter()
        await asyncio.gather(*(talk(http, session, turns) for session in self.sessions))
        seconds = perf_counter() - began
        self.cpu_s += self._cpu_s() - all_before
        self.first_cpu_s += cpu_s(first) - first_before
        self.turns += turns * len(self.sessions)
        self.seconds += seconds
        first_before = cpu_s(first)
        await asyncio.sleep(seconds)
        self.first_idle_cpu_s += cpu_s(first) - first_before

    def _cpu_s(self) -> float:
        return sum(server.cpu_s() for server in self.servers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=12, help="of each session in each round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one, apart, shards = asyncio.run(measure(Path(folder), options))
    ratio = shards.cpu_ms_per_turn / apart.cpu_ms_per_turn
    if options.json:
        rows = {each.name: {"cpu_ms_per_turn": each.cpu_ms_per_turn} for each in (one, apart, shards)}
        print(json.dumps(rows | {"cpu_ratio": ratio, "front_cpu_s": shards.first_cpu_s}, indent=2))
        return
    for each in (one, apart, shards):
        rate = each.turns / each.seconds
        print(f"{each.name:12} {rate:7.0f} turns/s  {each.cpu_ms_per_turn:6.3f} ms of CPU per turn")
    print(f"CPU per turn of shards: {ratio:.2f} times that of as many servers without a front")
    print(f"front: {shards.first_cpu_s:.3f} s of CPU while turns ran, {shards.first_idle_cpu_s:.3f} s without any")


async def measure(folder: Path, options: argparse.Namespace) -> list[Measured]:
    """One server, several and shards, with as many sessions at each process, in rounds that take turns."""
    script = folder / "script.toml"
    script.write_text(f"[[steps]]\ntext = {json.dumps(ANSWER)}\n")
    shared = ("--engine", "scripted", "--script", script, "--tokenizer", write_toy_model(folder / "toy"))
    starts = {"one server": [()], f"{options.shards} servers": [()] * options.shards}
    starts[f"{options.shards} shards"] = [("--shards", str(options.shards))]
    measured: list[Measured] = []
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        for name, commands in starts.items():
            opening = (
                harness_server(*shared, "--store", folder / f"{name} {n}", *own) for n, own in enumerate(commands)
            )
            begun = [await stack.enter_async_context(each) for each in opening]
            count = options.sessions * (1 if name == "one server" else options.shards)
            made = [await create(http, begun[n % len(begun)].url) for n in range(count)]
            await asyncio.gather(*(talk(http, session, WARM_UP) for session in made))
            measured.append(Measured(name, begun, made))
        for _ in range(options.rounds):
            for each in measured:
                await each.run(http, options.turns)
    return measured


async def create(http: aiohttp.ClientSession, url: str) -> dict[str, str]:
    async with http.post(f"{url}/sessions", json={}) as answer:
        created: dict[str, str] = await answer.json()
        return created


async def talk(http: aiohttp.ClientSession, session: dict[str, str], turns: int) -> None:
    """A conversation of so many turns, at the address that the session was given."""
    messages: list[dict[str, str]] = []
    for number in range(turns):
        messages.append({"role": "user", "content": QUESTION.format(number)})
        async with http.post(f"{session['base_url']}/v1/chat/completions", json={"messages": messages}) as answer:
            messages.append((await answer.json())["choices"][0]["message"])


if __name__ == "__main__":
    main()
