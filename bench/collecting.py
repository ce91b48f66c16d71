"""What it costs to collect the rollouts of an abort: long sessions by the hundred, all at once.

    python bench/collecting.py [--json] [--sessions 512] [--turns 50] [--tokens 32000] [--rounds 2]

A session server in a process of its own restores that many sessions from a store, and a `SessionManager` in this one
goes on with them (`resumes`). Every agent is inside a tool call when `abort_rollout` comes with its default budget.
For each round: how long each step took, how many samples came back whole, and the memory of this process before,
at its highest, with all samples held, and after they have been let go, beside what the samples' own columns take.
"""

import argparse
import asyncio
import gc
import json
import os
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import uvloop

from bench.tool_loop.processes import ServerProcess, child_process, forget_most_memory, memory_bytes
from harness.machine.this_process import settle
from harness.rollouts.agents.task import AgentTask, FunctionAgent
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.manager import SessionManager
from harness.server.serving import SWITCH_S
from tests.builders import user
from tests.session_servers.served import says, serving

MIB = 1 << 20
_COLUMNS = ("tokens", "loss_mask", "rollout_log_probs", "behavior_versions", "proximal_logprobs", "proximal_versions")


async def run_server(directory: Path) -> None:
    """Body of the server's process: prints its URL, runs until its standard input closes."""
    sys.setswitchinterval(SWITCH_S)  # as `harness serve` does
    async with serving(store=directory / "bench.db") as client:
        settle()
        print(client.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def write_one_session(directory: Path, turns: int, tokens: int) -> None:
    """Have a server record a session of `turns` turns and about `tokens` tokens, and drain it."""
    # Of a turn, in characters, which are tokens here; less what a template adds.
    half = max(1, tokens // turns // 2 - 20)
    async with serving(*says("a" * half), store=directory / "bench.db") as client:
        session, messages = await client.create(), list[Any]()
        for _ in range(turns):
            messages.append(user("q" * half))
            messages.append(await client.say(session, messages))
        for verb in ("drain", "resume"):
            (await client.http.post(f"/sessions/{verb}")).raise_for_status()


def copy_session(database: Path, copies: int) -> list[str]:
    """Put `copies` of the one session in `database` beside it; their ids."""
    ids = [f"{number:032x}" for number in range(copies)]
    with closing(sqlite3.connect(database)) as connection, connection:
        sessions, turns = (
            ", ".join(row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] not in own)
            for table, own in (("sessions", ("session_id", "api_key")), ("turns", ("session_id",)))
        )
        [original] = connection.execute("SELECT session_id FROM sessions").fetchone()
        for each in ids:
            connection.execute(
                f"INSERT INTO sessions (session_id, api_key, {sessions}) SELECT ?, ?, {sessions} FROM sessions"
                " WHERE session_id = ?",
                (each, f"sk-{each}", original),
            )
            connection.execute(
                f"INSERT INTO turns (session_id, {turns}) SELECT ?, {turns} FROM turns WHERE session_id = ?",
                (each, original),
            )
    return ids


async def measure(server: ServerProcess, ids: list[str], directory: Path) -> dict[str, Any]:
    """Go on with every session of `ids`, abort, and look at what comes back."""

    async def tool_call(**_: Any) -> None:
        started.release()
        await asyncio.Event().wait()

    started = asyncio.Semaphore(0)
    agent = FunctionAgent("tool_call", tool_call)
    async with SessionManager(server.url) as manager:
        tasks = [AgentTask(agent, "go", directory / each, "m", resumes=each) for each in ids]
        pending = [asyncio.create_task(manager.run(task)) for task in tasks]
        async with asyncio.timeout(300):
            for _ in ids:
                await started.acquire()
        gc.collect()
        before = psutil.Process().memory_info().rss
        forget_most_memory(os.getpid())
        began = perf_counter()
        report = await abort_rollout(pending, session_servers=[server.url], agent_hooks=[manager.abort_hooks()])
        seconds, highest = perf_counter() - began, memory_bytes(os.getpid(), "VmHWM")
    samples = [sample for rollout in report.rollouts for sample in rollout.samples]
    gc.collect()
    held = psutil.Process().memory_info().rss
    figures = {
        "sessions": len(ids),
        "tokens_per_sample": int(samples[0].tokens.size) if samples else 0,
        "turns_per_sample": len(samples[0].metadata["turns"]) if samples else 0,
        "samples": len(samples),
        "problems": len(report.problems),
        "abort_s": round(seconds, 2),
        "steps_s": {step.value: round(each, 2) for step, each in report.seconds.items()},
        "samples_mib": round(sum(getattr(each, name).nbytes for each in samples for name in _COLUMNS) / MIB),
        "manager_before_mib": round(before / MIB),
        "manager_highest_mib": round(highest / MIB),
        "manager_holding_samples_mib": round(held / MIB),
        "server_mib": round(server.process.memory_info().rss / MIB),
    }
    del report, samples, pending
    gc.collect()
    return figures | {"manager_after_mib": round(psutil.Process().memory_info().rss / MIB)}


async def main(sessions: int, turns: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        await write_one_session(directory, turns, tokens)
        ids = copy_session(directory / "bench.db", sessions * rounds)
        began = perf_counter()
        async with child_process(__file__, "--serve", directory) as server:
            restored_s = perf_counter() - began
            parts = [ids[start::rounds] for start in range(rounds)]
            figures = [await measure(server, part, directory / "work") for part in parts]
        return [{"restored_s": round(restored_s, 1)}, *figures]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=512)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    asked = parse()
    if asked.serve:
        uvloop.run(run_server(asked.serve))
    else:
        found = uvloop.run(main(asked.sessions, asked.turns, asked.tokens, asked.rounds))
        if asked.json:
            print(json.dumps(found))
        else:
            print("\n\n".join("\n".join(f"{name:30} {value}" for name, value in each.items()) for each in found))
