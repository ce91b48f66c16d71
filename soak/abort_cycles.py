"""Drain, abort, collect, resume, over and over, with many live sessions: what is left behind, and what is trained.

    python soak/abort_cycles.py [--cycles 1000] [--sessions 64] [--programs 1] [--json]
    python soak/abort_cycles.py --engine sglang|vllm|sglang=URL|vllm=URL [--model DIR] --cycles 50
    python soak/abort_cycles.py --engine sglang --turns 6 --cycles 300 --sessions 32 [--busy] [--keep FILE]

Every cycle starts rollouts with agents of every kind (they obey a 404, ignore it, rewrite their history, are in a
tool call for ever, or are programs that ignore SIGTERM), lets all of them work for a moment, aborts, and checks every
session it gets back: nothing after an incomplete turn is in a sample, the ledger balances, the gate is open, the engine
idle. Tasks, processes, file descriptors and sessions are counted before the first cycle and after the last, each time
while nothing but the server lives; of sandboxes no folder, cgroup, mount, container or process may be left. Exit code 1
when anything of that is wrong; who only used up the time of its step is `reported`. The random moments are those of
`--seed`.

With `--turns` every session plays a tool loop of so many turns before its abort, in the words of a script, and the file
of the store is read by somebody else (`tool_loops.py`); the abort comes when all of them have had their turns and some
are in flight. `--keep` adds the cycles to those in a file and goes on behind them, so that a run may be made in slices.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import psutil
import pytest

from harness.engines.base import TokenProvider
from harness.engines.connect import open_engine
from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.lab.lanes import INSTALLED, LaneEngine, LaneSpec, open_lane
from harness.lab.lanes.spec import Dtype
from harness.lab.models import resolve_model
from harness.rollouts.agents.task import AgentTask, FunctionAgent, ProgramAgent
from harness.rollouts.client.session_server import Deadlines
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.abort_report import AbortBudget, AbortReport
from harness.rollouts.control.engines import EngineInProcess, EngineWorker
from harness.rollouts.manager import SessionManager
from harness.rollouts.sandboxes.spec import SandboxSpec
from harness.samples.rollout import Rollout
from harness.server.serving import RunningServer, serve
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import open_store
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Sample
from soak.cycle_figures import Figures
from soak.tool_loops import ToolLoops
from tests.builders import user
from tests.sandbox_programs import configure_podman, podman_image
from tests.system.sandboxes.test_ends import left_of_boxes
from tests.toy_model import write_toy_model

ROOT = Path(__file__).resolve().parents[1]
BUDGET = AbortBudget(
    drain_s=5, engines_s=10, hooks_s=2, agents_s=0.2, kill_s=5, collect_s=20, cancel_s=2, resume_s=5, total_s=60
)
DEADLINES = Deadlines(create_s=30, read_s=20, end_s=10, delete_s=10)
_LOOKS = 100
_AT_WORK_S = 300
_LOOKS_AT_WORK = 100 * _AT_WORK_S
_IDLE_S = 5.0  # longer than a connection to an engine is kept for the next request
SCRIPT = Script(
    (
        ScriptStep(text="At once."),
        ScriptStep(text="After a while.", delay_s=0.05),
        ScriptStep(text="Never to its end.", fault=ScriptedFault.HANG, fault_after=5),
        ScriptStep(text="Word by word.", token_delay_s=0.02),
    )
)
_SPIN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
SLOWLY = Script((ScriptStep(text="In the words of sessions.", token_delay_s=0.01),))
STUBBORN_PROGRAM = """
import json, os, signal, time, urllib.error, urllib.request
signal.signal(signal.SIGTERM, signal.SIG_IGN)
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "go"}]}).encode()
while True:
    try:
        urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})).read()
    except urllib.error.HTTPError:
        time.sleep(0.05)
"""


@dataclass(frozen=True)
class Resources:
    tasks: int
    processes: int
    descriptors: int
    sessions: int


class Agents:
    """Function agents of every kind, over one connection pool."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    def all(self) -> list[FunctionAgent]:
        calls = (self.obey, self.ignore, self.rewrite, self.think)
        return [FunctionAgent(call.__name__, call) for call in calls]

    async def obey(self, base_url: str, **_: Any) -> dict[str, Any]:
        """Goes on until its first refusal."""
        messages: list[Any] = [user("go")]
        while (said := await self._call(base_url, messages)) is not None:
            messages += [said, user("more")]
        return {}

    async def ignore(self, base_url: str, **_: Any) -> None:
        """Asks the same again, whatever it is answered."""
        while True:
            await self._call(base_url, [user("go")])
            await asyncio.sleep(0.02)

    async def rewrite(self, base_url: str, **_: Any) -> None:
        """Goes on from a history that never was."""
        for number in range(1000):
            await self._call(base_url, [user("go"), {"role": "assistant", "content": f"{number}"}, user("more")])
            await asyncio.sleep(0.02)

    async def think(self, base_url: str, **_: Any) -> None:
        """One call, then a tool call that never ends."""
        await self._call(base_url, [user("go")])
        await asyncio.sleep(3600)

    async def _call(self, base_url: str, messages: list[Any]) -> Any:
        body = {"model": "m", "messages": messages}
        async with self._http.post(f"{base_url}/chat/completions", json=body) as response:
            answer = await response.json()
        return answer["choices"][0]["message"] if response.status == 200 else None


@dataclass
class Cycles:
    served: "Served"
    manager: SessionManager
    agents: list[FunctionAgent]
    options: argparse.Namespace
    figures: Figures

    async def run_one(self) -> None:
        began, cycle = perf_counter(), self.figures.cycles + 1
        chance = random.Random(f"{self.options.seed} {cycle}")  # the same moments, whichever slice it is run in
        pending = [asyncio.create_task(self.manager.run(task)) for task in self._tasks(chance)]
        faults = [] if await self._all_at_work(pending) else ["not every session had its turns in time"]
        await asyncio.sleep(chance.uniform(*self.options.work_s))
        report = await abort_rollout(
            pending,
            session_servers=[self.served.server.url],
            engine_workers=[self.served.worker],
            agent_hooks=[self.manager.abort_hooks()],
            budget=BUDGET,
            rollout_id=0,
        )
        faults += await self._faults(report)
        self.figures.cycles = cycle
        self.figures.seconds += perf_counter() - began
        self.figures.abort_s.append(report.total_s)
        self.figures.reported += [f"cycle {cycle}: {line}" for line in report.problems]
        self.figures.wrong += [f"cycle {cycle}: {line}" for line in faults]

    async def _all_at_work(self, pending: list[asyncio.Task[Rollout]]) -> bool:
        """Every rollout has its session and its turns, or has ended already, and some turn is in flight."""
        sessions, turns = self.served.server.server.sessions, self.options.turns
        for _ in range(_LOOKS_AT_WORK):
            have_turns = sum(len(session.turns) >= turns for session in sessions) >= sum(
                not each.done() for each in pending
            )
            if have_turns and any(session.turns_in_flight for session in sessions):
                return True
            await asyncio.sleep(0.01)  # a session server offers nothing to wait for, and a soak may look
        return False

    def _tasks(self, chance: random.Random) -> Iterator[AgentTask]:
        loops, box = self.served.loops, self.served.box
        python = sys.executable if box.image is None else "python3"
        stubborn = ProgramAgent("stubborn", (python, "-S", "-c", STUBBORN_PROGRAM))
        for number in range(self.options.sessions):
            program = replace(stubborn if loops is None else loops.program(), sandbox=box)
            agent = program if number < self.options.programs else chance.choice(self.agents)
            limits = {"limits": {"tokens_per_turn": self.options.tokens}, "sampling": {"temperature": 1.0}}
            session = limits if loops is None else loops.session(chance)
            workdir = self.served.directory / str(number)
            yield AgentTask(agent, f"Add {number}.", workdir, "m", deadline_s=_AT_WORK_S + 60, session=session)

    async def _faults(self, report: AbortReport) -> list[str]:
        faults: list[str] = []
        for rollout in report.rollouts:
            self._count(rollout)
            faults += [f"session {rollout.session_id}: {fault}" for fault in session_faults(rollout)]
        if self.served.loops is not None:
            reading = self.served.loops.judge(report.rollouts)
            self.figures.cut_inside.update(sessions=reading.cut_sessions, turns=reading.cut_turns)
            faults += reading.faults
        if len(report.rollouts) != self.options.sessions:
            faults.append(f"{len(report.rollouts)} rollouts of {self.options.sessions} were collected")
        if self.served.server.server.gatekeeper.gate.state != "open":
            faults.append(f"the gate is {self.served.server.server.gatekeeper.gate.state}")
        if len(self.served.server.server.sessions):
            faults.append(f"{len(self.served.server.server.sessions)} sessions are left")
        if not await self._is_idle():
            faults.append("the engine is still busy")
        return faults

    async def _is_idle(self) -> bool:
        """The engine has nothing left; servers say so some time after it is true."""
        for _ in range(_LOOKS):
            health = await self.served.engine.health()
            if not health.running and not health.waiting:
                return True
            await asyncio.sleep(0.1)
        return False

    def _count(self, rollout: Rollout) -> None:
        figures = self.figures
        figures.rollouts += 1
        figures.samples += len(rollout.samples)
        figures.outcomes[rollout.outcome.kind.value] += 1
        figures.turns.update(turn["status"] for turn in rollout.session["turns"])
        ledger = rollout.session["ledger"]
        figures.tokens.update({name: ledger[name] for name in ("generated", "trained", "masked")})
        figures.tokens.update(ledger["dropped"])


def session_faults(rollout: Rollout) -> Iterator[str]:
    """What is wrong with a session and its samples; looks at nothing but what a trainer gets."""
    turns = {turn["turn"]: turn for turn in rollout.session["turns"]}
    ledger = rollout.session["ledger"]
    for sample in rollout.samples:
        yield from _sample_faults(sample, turns)
    difference = ledger["generated"] - ledger["trained"] - ledger["masked"] - sum(ledger["dropped"].values())
    if difference:
        yield f"the ledger is off by {difference}"
    if ledger["trained"] != sum(int(sample.loss_mask.sum()) for sample in rollout.samples):
        yield f"{ledger['trained']} tokens are said to be trained, the samples have others"
    if rollout.outcome.cause in ("engine", "harness"):
        yield f"{rollout.outcome.kind}: {rollout.outcome.detail}"


def _sample_faults(sample: Sample, turns: dict[int, Any]) -> Iterator[str]:
    *before, last = (turns[index] for index in sample.metadata["turns"])
    if any(turn["status"] != "completed" for turn in before):
        yield f"sample {sample.metadata['turns']} has tokens after an incomplete turn"
    if sample.tokens.size != last["prompt_length"] + last["output_length"]:
        yield f"sample {sample.metadata['turns']} is not what its last turn saw and said"
    if sample.status != last["status"]:
        yield f"sample {sample.metadata['turns']} is {sample.status}, its last turn {last['status']}"


async def resources(server: RunningServer) -> Resources:
    """What this process has, once idle connections have been closed and that has been noticed."""
    await asyncio.sleep(_IDLE_S)
    process = psutil.Process()
    return Resources(
        len(asyncio.all_tasks()), len(process.children(recursive=True)), process.num_fds(), len(server.server.sessions)
    )


async def run(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """All cycles; the figures, with the resources before the first and after the last that were run here."""
    what = {name: value for name, value in vars(options).items() if name not in ("cycles", "minutes", "keep", "json")}
    figures = Figures() if options.keep is None else Figures.load(options.keep, what)
    async with _served(options) as served:
        await _cycles(served, options, Figures(), lambda figures: figures.cycles < 1)  # what is made once is made now
        before = await resources(served.server)
        until = perf_counter() + 60 * options.minutes

        def is_wanted(figures: Figures) -> bool:
            if options.keep is not None:
                figures.save(options.keep, what)
            if figures.cycles % max(1, options.cycles // 20) == 0:
                say(f"{figures.cycles}/{options.cycles} cycles, {figures.seconds:.0f} s, {len(figures.wrong)} wrong")
            return bool(figures.cycles < options.cycles and perf_counter() < until)

        await _cycles(served, options, figures, is_wanted)
        after = await resources(served.server)
        if left := {what: found for what, found in left_of_boxes().items() if found}:
            figures.wrong.append(f"left of boxes: {left}")
    if any(now > then for now, then in zip(astuple(after), astuple(before), strict=True)):
        figures.wrong.append(f"left behind: {before} became {after}")
    if options.keep is not None:
        figures.save(options.keep, what)
    return figures.to_json() | {"run": what, "before": asdict(before), "after": asdict(after)}


async def _cycles(
    served: "Served", options: argparse.Namespace, figures: Figures, is_wanted: Callable[[Figures], bool]
) -> None:
    """Cycles as long as another one is wanted, with a manager and connections of their own."""
    async with (
        SessionManager(served.server.url, grace_s=0.3, deadlines=DEADLINES) as manager,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as http,
    ):
        agents = Agents(http).all() if served.loops is None else served.loops.agents(http)
        cycles = Cycles(served, manager, agents, options, figures)
        while is_wanted(figures):
            await cycles.run_one()


@dataclass(frozen=True)
class Served:
    server: RunningServer
    engine: TokenProvider
    worker: EngineWorker | str
    directory: Path
    loops: ToolLoops | None
    """What sessions play; None lets them say what the engine does."""
    box: SandboxSpec


@asynccontextmanager
async def _served(options: argparse.Namespace) -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory() as name, _busy_cores(options.busy), _sandbox(options.sandbox, Path(name)) as box:
        directory = Path(name)
        is_scripted = options.engine == "scripted"
        model = write_toy_model(directory / "toy") if is_scripted else resolve_model(options.model)
        chat_tokenizer = open_chat_tokenizer(model)
        async with _address(options.engine, model, Dtype(options.dtype)) as address:
            engine: TokenProvider
            if is_scripted:
                engine = ScriptedEngine(chat_tokenizer.tokenizer, SLOWLY if options.turns else SCRIPT)
                worker: EngineWorker | str = EngineInProcess(engine)
            else:
                engine, worker = open_engine(address, tokenizer=chat_tokenizer.tokenizer), address
            store = directory / "s.db" if options.turns else "memory"
            loops = ToolLoops(options.turns, chat_tokenizer, directory / "s.db") if options.turns else None
            settings = ServerSettings(allow_forced_tokens=loops is not None)
            async with serve(engine, chat_tokenizer, open_store(store), settings) as server:
                yield Served(server, engine, worker, directory / "rollouts", loops, box)


@contextmanager
def _busy_cores(is_busy: bool) -> Iterator[None]:
    """Every core has somebody else's work to do while the block runs, at our own priority."""
    processes = [subprocess.Popen((sys.executable, "-S", "-c", _SPIN)) for _ in range(is_busy * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@asynccontextmanager
async def _address(engine: str, model: Path, dtype: Dtype) -> AsyncIterator[str]:
    """Where `engine` is; a server that is only named is started."""
    if engine in INSTALLED:
        async with open_lane(LaneSpec(LaneEngine(engine), model, dtype=dtype)) as lane:
            yield f"{engine}={lane.url}"
    else:
        yield engine


@contextmanager
def _sandbox(kind: str, folder: Path) -> Iterator[SandboxSpec]:
    """The box of the processes: with a limit, so that a cgroup could be left, and on an image that is made here."""
    with pytest.MonkeyPatch.context() as patch:
        match kind:
            case "none":
                yield SandboxSpec()
            case "podman":
                configure_podman(folder, patch)
                yield SandboxSpec(kind=kind, image=podman_image(), memory_mb=256)
            case _:
                yield SandboxSpec(kind=kind, memory_mb=256)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--programs", type=int, default=1, help="how many of the agents are processes")
    parser.add_argument("--sandbox", default="none", choices=["none", "bwrap", "podman"], help="of the processes")
    parser.add_argument("--engine", default="scripted", help="scripted, sglang, vllm, sglang=URL or vllm=URL")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what a real engine serves, or is to serve")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a turn at most")
    parser.add_argument(
        "--work-s", type=float, nargs=2, default=[0.0, 0.3], help="how long agents work before an abort"
    )
    parser.add_argument("--turns", type=int, default=0, help="of a tool loop before its abort; 0: whatever is said")
    parser.add_argument("--dtype", default="float32", choices=list(Dtype), help="of a server that is started")
    parser.add_argument("--busy", action="store_true", help="beside a process on every core that computes all the time")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="go on behind the cycles in FILE, and add to them")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cycle so long after the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if 0 < options.turns < 3:
        parser.error("--turns: expected at least 3, for a turn inside the loop is cut")
    return options


def main() -> None:
    options = _options()
    figures = asyncio.run(run(options, lambda line: print(line, file=sys.stderr, flush=True)))
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name}: {value}" for name, value in figures.items()))
    sys.exit(bool(figures["wrong"]))


if __name__ == "__main__":
    main()
