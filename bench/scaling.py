"""How many cores and how much memory so many sessions take: arithmetic from measured costs, and a simulation of it.

    python bench/scaling.py [--json] [--every 30]

Costs are those that docs/performance.md and docs/capacity.md state. The arithmetic divides: turns by processes, each
busy for no more than a share of its time, with the mean wait of a queue whose work comes at random and takes one time
(Pollaczek and Khinchine: rho / (2 (1 - rho)) of a turn's time). The simulation knows none of that: sessions that think,
ask their shard, and wait until it has done what was asked before. Printed is the table of docs/scaling.md.
"""

import argparse
import heapq
import json
import math
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[1] / "docs"
SESSIONS = (100, 1_000, 10_000, 100_000)
EVERY_S = 30.0
"""Seconds from the answer to one turn of a session to its next request: tools, and the engine's own time."""
BUSY = 0.6
"""Share of its time that a process works; above, waits grow faster than sessions."""
PROCESS_MIB = 137
"""Of a server without sessions, tokenizer of Qwen3 (docs/capacity.md)."""


class Costs(NamedTuple):
    """Measured."""

    turn_s: float
    """Of one core."""
    session_kib: float
    """Live, of 100 turns and 29 400 tokens."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What so many sessions take."""

    sessions: int
    turns_per_s: float
    cores: float
    """Busy all the time."""
    shards: int
    memory_gib: float
    wait_ms: float
    """Mean time that a turn waits for its shard."""


class Simulated(NamedTuple):
    """What became of them."""

    turns_per_s: float
    busy: float
    """Share of their time that shards worked."""
    wait_ms: float


def measured_costs() -> Costs:
    """Those that the pages state."""
    turn = re.search(r"^\| 32 x 50, SQLite \| ([\d.]+) ms \|", _read("performance.md"), re.MULTILINE)
    session = re.search(r"^\| live: 100 turns[^|]*\| ([\d ]+) KiB \|", _read("capacity.md"), re.MULTILINE)
    assert turn is not None
    assert session is not None
    return Costs(float(turn[1]) / 1000, float(session[1].replace(" ", "")))


def needs(sessions: int, costs: Costs, *, every_s: float = EVERY_S) -> Needs:
    """What `sessions` take, each of which asks `every_s` after its last answer."""
    turns_per_s = sessions / (every_s + costs.turn_s)
    cores = turns_per_s * costs.turn_s
    shards = max(1, math.ceil(cores / BUSY))
    busy = cores / shards
    memory_mib = shards * PROCESS_MIB + sessions * costs.session_kib / 1024
    wait_s = busy / (2 * (1 - busy)) * costs.turn_s
    return Needs(sessions, turns_per_s, cores, shards, memory_mib / 1024, wait_s * 1000)


def simulate(sessions: int, shards: int, costs: Costs, *, every_s: float, turns: int, seed: int) -> Simulated:
    """Play about so many turns; sessions think for a random time of that mean, shards do one thing after the other."""
    draw = random.Random(seed)
    asks = [(draw.expovariate(1 / every_s), session) for session in range(sessions)]
    heapq.heapify(asks)
    free_at, waited_s, played = [0.0] * shards, 0.0, 0
    while True:
        now, session = heapq.heappop(asks)
        if played == turns:
            return Simulated(played / now, played * costs.turn_s / (now * shards), 1000 * waited_s / played)
        shard = session % shards
        begins = max(now, free_at[shard])
        free_at[shard] = begins + costs.turn_s
        waited_s, played = waited_s + begins - now, played + 1
        heapq.heappush(asks, (free_at[shard] + draw.expovariate(1 / every_s), session))


def row(needed: Needs) -> str:
    """The line of the table."""
    sessions = f"{needed.sessions:,}".replace(",", " ")
    return (
        f"| {sessions} | {needed.turns_per_s:.0f} | {needed.cores:.2f} | {needed.shards} | {needed.memory_gib:.1f} GiB"
        f" | {needed.wait_ms:.1f} ms |"
    )


def main() -> None:
    """Print the table, and beside it what the simulation makes of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds from an answer to the next request")
    given = parser.parse_args()
    costs = measured_costs()
    for sessions in SESSIONS:
        needed = needs(sessions, costs, every_s=given.every)
        played = simulate(sessions, needed.shards, costs, every_s=given.every, turns=max(200_000, 4 * sessions), seed=7)
        if given.json:
            print(json.dumps({**asdict(needed), "simulated": played._asdict()}))
        else:
            busy = 100 * needed.cores / needed.shards
            print(f"{row(needed)}   busy {busy:.1f} %; simulated {100 * played.busy:.1f} %, {played.wait_ms:.2f} ms")


def _read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
