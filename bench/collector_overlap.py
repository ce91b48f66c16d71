"""How well a step overlaps generation and learning: time against the longer of the two, queue, live segments, memory.

    python bench/collector_overlap.py [--rollouts 64] [--concurrency 8] [--steps 200]

Scripted engine, scripted learner, a real session server and agents that are functions, all in this process. Both sides
mostly wait, in ratios from 1/4 to 4, so that what is measured is the pipeline: a step should take 1.1 times the longer
of generation and learning, one micro-batch until there is a pack, and one pack at its end. Exits 1 when it does not,
when more packs live than one with the learner and one in the queue, when more segments live than the look-ahead and two
packs hold, or when memory grows between step 20 and the last one by more than 5 MiB.
"""

import argparse
import asyncio
import gc
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.rollouts.agents.task import AgentTask, FunctionAgent
from harness.rollouts.manager import SessionManager
from harness.samples.pack_stream import PackStream
from harness.samples.packs import Pack
from harness.samples.rollout import Rollout
from harness.samples.segments import Segment
from harness.server.serving import serve
from harness.server.store.memory import MemoryStore
from harness.server.telemetry.logging import configure_logging
from harness.tokens.model_family import open_chat_tokenizer
from harness.training.collector.groups import RolloutIndex
from harness.training.collector.pipeline import StepPipeline
from harness.training.collector.segment_maker import SegmentMaker
from harness.training.collector.session_source import SessionSource
from harness.training.collector.step_rules import StepBudget, StepRules
from harness.training.learner.learner import LossSums
from harness.training.learner.scripted import ScriptedLearner
from tests.toy_model import write_toy_model

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
SECONDS = 6.0  # of the longer side, in a step that is timed
LOOKAHEAD = 4
PER_PACK = 8  # segments
MIB = 1 << 20
MOST_GROWTH_MIB = 5


@dataclass(slots=True)
class Watch:
    """Segments and packs on their way from rollouts to the learner."""

    added: int = 0
    formed: int = 0
    learned: int = 0
    learned_packs: int = 0
    most_live: int = 0
    most_packs: int = 0
    most_in_a_pack: int = 0


class WatchedStream(PackStream):
    """Counts what goes in and comes out."""

    watch = Watch()

    def add(self, segment: Segment) -> Pack | None:
        """As ever."""
        watch = self.watch
        watch.added += 1
        watch.most_live = max(watch.most_live, watch.added - watch.learned)
        return super().add(segment)

    def _take_pack(self) -> Pack:
        pack = super()._take_pack()
        self.watch.formed += 1
        self.watch.most_packs = max(self.watch.most_packs, self.watch.formed - self.watch.learned_packs)
        self.watch.most_in_a_pack = max(self.watch.most_in_a_pack, len(pack.numbers))
        return pack


class WatchedLearner(ScriptedLearner):
    """Counts what it gets."""

    def accumulate(self, pack: Pack) -> LossSums:
        """As ever."""
        sums = super().accumulate(pack)
        WatchedStream.watch.learned += len(pack.numbers)
        WatchedStream.watch.learned_packs += 1
        return sums


class Bench:
    """A server and rollouts of `seconds` each; every sample is about as long as the others."""

    def __init__(self, manager: SessionManager, http: httpx.AsyncClient, directory: Path) -> None:
        self._manager = manager
        self._http = http
        self._directory = directory
        self.seconds = 0.0

    def source(self) -> SessionSource:
        """Rollouts of one model call."""

        def make_task(index: RolloutIndex) -> AgentTask:
            return AgentTask(
                FunctionAgent("wait", self._play), f"Rollout {index.group.number % 10}", self._directory, "m"
            )

        async def reward(index: RolloutIndex, rollout: Rollout) -> float:
            del rollout
            return float(index.member)

        return SessionSource(self._manager, make_task, reward)

    async def _play(self, base_url: str, prompt: str, **_: Any) -> dict[str, Any]:
        await asyncio.sleep(self.seconds)
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
        answer = await self._http.post(f"{base_url}/chat/completions", json=body)
        answer.raise_for_status()
        return {}


@asynccontextmanager
async def _opened(directory: Path) -> AsyncIterator[Bench]:
    chat_tokenizer = open_chat_tokenizer(write_toy_model(directory / "toy"))
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script((ScriptStep(text="Understood." * 8),)))
    async with (
        serve(engine, chat_tokenizer, MemoryStore()) as server,
        SessionManager(server.url, engines=[engine]) as manager,
        httpx.AsyncClient(timeout=60, trust_env=False) as http,
    ):
        yield Bench(manager, http, directory / "work")


async def time_ratio(bench: Bench, packing_length: int, ratio: float, rollouts: int, concurrency: int) -> bool:
    """One step in which generation takes `ratio` times as long as learning; whether it was quick enough."""
    waves, packs = rollouts / concurrency, rollouts / PER_PACK
    bench.seconds = SECONDS * min(1.0, ratio) / waves
    learner = WatchedLearner(seconds_per_pack=SECONDS / max(1.0, ratio) / packs)
    rules = StepRules(StepBudget(rollouts, 2), concurrency=concurrency)
    WatchedStream.watch = watch = Watch()
    async with StepPipeline(
        bench.source(), rules, learner, SegmentMaker(packing_length), lookahead=LOOKAHEAD
    ) as pipeline:
        step = await pipeline.run(0, version=0)
    times, generate_s = step.times, step.packed.collected.generate_s
    one_wave, one_pack = generate_s / waves, times.forward_s / len(step.packed.packs)
    bound = 1.1 * max(generate_s, times.forward_s) + one_wave + one_pack
    most_live = LOOKAHEAD + 2 * watch.most_in_a_pack
    print(
        f"{ratio:5.2f} {len(step.packed.packs):6} {generate_s:9.2f} {times.forward_s:9.2f} {times.total_s:9.2f}"
        f" {bound:9.2f} {times.overlap_s / times.forward_s:9.2f} {times.pack_waits_s:7.2f}"
        f" {watch.most_packs:6} {watch.most_live:6} {most_live:6}"
    )
    return times.total_s <= bound and watch.most_packs <= 2 and watch.most_live <= most_live


async def measure_growth(bench: Bench, packing_length: int, steps: int) -> bool:
    """Steps without waits; whether memory stays what it is."""
    bench.seconds = 0.0
    rules = StepRules(StepBudget(16, 2), concurrency=16)
    process, early = psutil.Process(), 0.0
    async with StepPipeline(
        bench.source(), rules, ScriptedLearner(), SegmentMaker(packing_length), lookahead=LOOKAHEAD
    ) as pipeline:
        for step in range(1, steps + 1):
            await pipeline.run(step, version=0)
            if step == 20:
                gc.collect()
                early = process.memory_info().rss / MIB
    gc.collect()
    late = process.memory_info().rss / MIB
    print(f"memory after step 20: {early:.1f} MiB, after step {steps}: {late:.1f} MiB")
    return late - early <= MOST_GROWTH_MIB


async def measure_length(bench: Bench) -> int:
    """Tokens of the longest sample."""
    pipeline = StepPipeline(bench.source(), StepRules(StepBudget(20, 2)), ScriptedLearner(), SegmentMaker(10_000))
    async with pipeline:
        step = await pipeline.run(0, version=0)
    return max(each.tokens for each in step.packed.samples)


async def main(rollouts: int, concurrency: int, steps: int) -> bool:
    """Whether every measurement is within its bound."""
    configure_logging("error")
    print("ratio  packs  generate     learn      step     bound   overlap   waits  packs   live  bound", end="")
    print(f"   ({rollouts} rollouts, {concurrency} at once; seconds, segments)")
    with (
        tempfile.TemporaryDirectory() as directory,
        patch("harness.training.collector.pipeline.PackStream", WatchedStream),
    ):
        async with _opened(Path(directory)) as bench:
            packing_length = PER_PACK * await measure_length(bench)
            is_quick = [await time_ratio(bench, packing_length, each, rollouts, concurrency) for each in RATIOS]
            is_flat = await measure_growth(bench, packing_length, steps)
    return all(is_quick) and is_flat


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    sys.exit(not asyncio.run(main(arguments.rollouts, arguments.concurrency, arguments.steps)))
