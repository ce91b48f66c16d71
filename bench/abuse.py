"""What a session that behaves notices of clients that mean harm.

    python bench/abuse.py [--json] [--rounds N] [--turns N] [--at-a-time N]

One agent takes turns at `harness serve` (scripted engine), alone and then while another process sends the requests of
`tests/system/abuse`, some at a time, again and again, in alternating rounds; latencies of the rounds are put together.
The ratio of the two p99 is the figure: 2 is the most that is wanted. Where there are few cores, the attackers' own
processor time is part of it, and is printed.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import httpx
import psutil

from tests.session_servers.served import Served, bearer, url_of
from tests.system.abuse.hostile_requests import Prey, hostile_requests
from tests.system.abuse.siege import Host, besiege, serve

THINK_S = 0.02
WARM_UP = 10  # turns


async def take_turns(host: Host, session: Served, turns: int) -> list[float]:
    """Milliseconds of each turn of a conversation of its own."""
    messages: list[dict[str, str]] = []
    latencies = []
    async with httpx.AsyncClient(base_url=host.http.base_url, headers=bearer(session.api_key), timeout=60) as http:
        for number in range(turns):
            messages.append({"role": "user", "content": f"{perf_counter()}: and number {number}?"})
            began = perf_counter()
            answer = await http.post(url_of(session), json={"messages": messages})
            latencies.append((perf_counter() - began) * 1000)
            messages.append(answer.raise_for_status().json()["choices"][0]["message"])
            await asyncio.sleep(THINK_S)
    return latencies


async def attack_for_ever(address: str, prey: Prey, at_a_time: int) -> None:
    """Body of the attackers' process."""
    name, _, port = address.partition(":")
    async with httpx.AsyncClient() as http:
        host = Host(0, (name, int(port)), http, "")
        hostiles = list(hostile_requests(prey))
        while True:
            await besiege(host, hostiles, at_a_time=at_a_time)


async def measure(rounds: int, turns: int, at_a_time: int) -> dict[str, float]:
    """The figures."""
    alone, beside = list[float](), list[float]()
    attackers_s = 0.0
    with tempfile.TemporaryDirectory() as directory:
        async with serve(Path(directory)) as host:
            guest, own, gone = [await host.create("bench") for _ in range(3)]
            await host.http.delete(f"/sessions/{gone.session_id}")
            prey = json.dumps([own.session_id, own.api_key, guest.session_id, gone.api_key])
            await take_turns(host, guest, WARM_UP)
            for _ in range(rounds):
                alone += await take_turns(host, guest, turns)
                address = "{}:{}".format(*host.address)
                attackers = await asyncio.create_subprocess_exec(
                    *(sys.executable, __file__, "--attack", address, "--prey", prey, "--at-a-time", str(at_a_time))
                )
                await asyncio.sleep(3)  # it imports and begins
                beside += await take_turns(host, guest, turns)
                attackers_s += sum(psutil.Process(attackers.pid).cpu_times()[:2])
                attackers.kill()
                await attackers.wait()
            metrics = await host.metrics()
    answers = sum(metrics[name] for name in metrics if name.startswith(("harness_errors_total", "harness_turns_total")))
    own_turns = len(alone) + len(beside) + WARM_UP
    return {
        "turns": len(alone),
        "hostile_requests": answers - own_turns,
        "attackers_cpu_s": attackers_s,
        "alone_p50_ms": statistics.median(alone),
        "beside_p50_ms": statistics.median(beside),
        "alone_p99_ms": statistics.quantiles(alone, n=100)[98],
        "beside_p99_ms": statistics.quantiles(beside, n=100)[98],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=200, help="of a round, each alone and beside the attackers")
    parser.add_argument("--at-a-time", type=int, default=16, help="hostile requests")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--prey", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        asyncio.run(attack_for_ever(options.attack, Prey(*json.loads(options.prey)), options.at_a_time))
        return
    found = asyncio.run(measure(options.rounds, options.turns, options.at_a_time))
    ratio = found["beside_p99_ms"] / found["alone_p99_ms"]
    if options.json:
        print(json.dumps({**found, "p99_ratio": ratio}))
        return
    for name, value in found.items():
        print(f"{name:>20} {value:10.1f}")
    print(f"{'p99 ratio':>20} {ratio:10.2f}   ({'holds' if ratio <= 2 else 'does not hold'}: at most 2)")


if __name__ == "__main__":
    main()
