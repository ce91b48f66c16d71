"""From the abort to "all engines idle and everything collected", against agents of one behavior at a time.

    python bench/abort_latency.py [--aborts 40] [--sessions 16] [--json]

cooperate: ends at its first 404. ignore: asks again for ever, whatever it is answered. hang: is in a tool call for
ever, and as a program ignores SIGTERM too. Each as an async function and as a process. Engine and session server are
in this process; half of the turns hang in the middle of their decoding when the abort comes. Prints p50 and p99 in
seconds beside the time that the budget gives agents and the total it can never exceed; exit code 1 when one does.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import aiohttp

from harness.control.abort import abort_rollout
from harness.control.abort_report import AbortBudget
from harness.control.engines import EngineInProcess
from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.rollouts.agents.task import Agent, AgentTask, FunctionAgent, ProgramAgent
from harness.rollouts.manager import SessionManager
from harness.server.serving import RunningServer, serve
from harness.store.memory import MemoryStore
from harness.tokens.model_family import open_chat_tokenizer
from soak.abort_cycles import Agents, toy_folder

BUDGET = AbortBudget(agents_s=2, kill_s=2, collect_s=10, total_s=45)
SCRIPT = Script(
    (ScriptStep(text="At once."), ScriptStep(text="Never to its end.", fault=ScriptedFault.HANG, fault_after=5))
)
CALL = """
import json, os, signal, time, urllib.error, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
def call(number):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"go {number}"}]}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})).read()
"""
PROGRAMS = {
    "cooperate": """
try:
    for number in range(1000):
        call(number)
except urllib.error.HTTPError as error:
    assert error.code == 404
""",
    "ignore": """
for number in range(10**9):
    try:
        call(number)
    except urllib.error.HTTPError:
        time.sleep(0.05)
""",
    "hang": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
call(0)
while True:
    time.sleep(60)
""",
}


@dataclass
class Bench:
    """What aborts are measured on."""

    server: RunningServer
    engine: ScriptedEngine
    manager: SessionManager
    directory: Path
    sessions: int

    async def one(self, agent: Agent) -> float:
        """Seconds of one abort."""
        tasks = [
            AgentTask(agent, "go", self.directory / str(number), "m", deadline_s=300) for number in range(self.sessions)
        ]
        pending = [asyncio.create_task(self.manager.run(task)) for task in tasks]
        await self._all_work()
        began = perf_counter()
        report = await abort_rollout(
            pending,
            session_servers=[self.server.url],
            engine_workers=[EngineInProcess(self.engine)],
            agent_hooks=[self.manager.abort_hooks()],
            budget=BUDGET,
        )
        seconds = perf_counter() - began
        health = await self.engine.health()
        if report.problems or health.running or len(report.rollouts) != self.sessions:
            raise SystemExit(f"not clean: {report.problems}, {health.running} requests still run")
        return seconds

    def _at_work(self) -> int:
        return sum(bool(each.turns or each.turns_in_flight) for each in self.server.server.sessions)

    async def _all_work(self) -> None:
        """Every session has had a turn."""
        async with asyncio.timeout(60):
            # A session server offers nothing to wait for, and a bench may look.
            while self._at_work() < self.sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)


async def run(options: argparse.Namespace) -> list[dict[str, object]]:
    """A row per behavior and kind of agent."""
    with tempfile.TemporaryDirectory() as name:
        chat_tokenizer = open_chat_tokenizer(toy_folder(Path(name) / "toy"))
        engine = ScriptedEngine(chat_tokenizer.tokenizer, SCRIPT)
        async with (
            serve(engine, chat_tokenizer, MemoryStore()) as server,
            SessionManager(server.url) as manager,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as http,
        ):
            bench = Bench(server, engine, manager, Path(name) / "rollouts", options.sessions)
            rows = []
            for behavior, kind, agent in _agents(Agents(http)):
                await bench.one(agent)
                times = sorted([await bench.one(agent) for _ in range(options.aborts)])
                rows.append(_row(behavior, kind, times))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            return rows


def _agents(functions: Agents) -> list[tuple[str, str, Agent]]:
    calls = {"cooperate": functions.obey, "ignore": functions.ignore, "hang": functions.think}
    return [
        *((behavior, "function", FunctionAgent(behavior, call)) for behavior, call in calls.items()),
        *(
            (behavior, "program", ProgramAgent(behavior, (sys.executable, "-S", "-c", CALL + source)))
            for behavior, source in PROGRAMS.items()
        ),
    ]


def _row(behavior: str, kind: str, times: list[float]) -> dict[str, object]:
    return {
        "agents": behavior,
        "kind": kind,
        "aborts": len(times),
        "p50_s": round(statistics.median(times), 2),
        "p99_s": round(times[int(0.99 * (len(times) - 1) + 0.5)], 2),
        "agents_get_s": BUDGET.agents_s,
        "bound_s": BUDGET.total_s,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--aborts", type=int, default=40)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    if options.json:
        print(json.dumps(rows))
    else:
        print("| agents | kind | p50 | p99 |\n| --- | --- | --- | --- |")
        for row in rows:
            print(f"| {row['agents']} | {row['kind']} | {row['p50_s']} s | {row['p99_s']} s |")
    sys.exit(any(float(str(row["p99_s"])) > BUDGET.total_s for row in rows))


if __name__ == "__main__":
    main()
