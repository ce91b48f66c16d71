"""Tool loops straight against SGLang's own chat completions, and the same through a session server, in one run.

    python bench/real_overhead.py [--sessions 8,32] [--turns 6] [--tokens 48] [--pairs 3] [--model NAME]
        [--engine URL] [--json]

A real SGLang on this machine's CPU (`harness engine up sglang` installs the same). Every turn sends the history with
the answer of a tool behind it, and gets `--tokens` tokens whose words are known: the engine is made to say them
(`server_patch.force_tokens`), so both ways do the same work. Both ask for the logprob of every token. The session
server is `harness serve` with a SQLite store, a process of its own. The two ways take turns, `--pairs` times; which
goes first changes. Printed are the tokens a second and the latency of a turn of each run, and how many of the direct
run's tokens a second are left through the server (the median of the pairs; wanted: 0.98).
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import aiohttp

from bench.tool_loop.bars import Bar
from bench.tool_loop.processes import harness_server
from harness.lab.lanes import Dtype, LaneEngine, LaneSpec, open_lane
from harness.lab.models import resolve_model
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.model_family import open_chat_tokenizer
from server_patch.force_tokens.script import PARAMETER

LEAST = 0.98
CONTEXT = 4096
WORDS = "The tool says what I asked it for and I will ask it again for the next part of what I want to know. "


@dataclass(frozen=True)
class Way:
    """How sessions of one run are played: where, and what makes the engine say its words."""

    name: str
    url: str
    model: str
    text: str
    ids: list[int]
    """What the engine says each turn, its end of turn included."""
    turns: int

    async def open(self, http: aiohttp.ClientSession) -> tuple[str, dict[str, Any]]:
        """Where a session's model calls go, and what each of them says besides its messages."""
        asked: dict[str, Any] = {"model": self.model, "logprobs": True, "max_tokens": len(self.ids), "temperature": 1.0}
        if self.name == "direct":
            return self.url, {**asked, "custom_params": {PARAMETER: self.ids}}
        script = {"steps": [{"tokens": self.ids}] * self.turns}
        async with http.post(f"{self.url}/sessions", json={"script": script}) as answer:
            answer.raise_for_status()
            return (await answer.json())["base_url"], asked

    async def converse(self, http: aiohttp.ClientSession, opening: str) -> list[float]:
        url, asked = await self.open(http)
        messages = [{"role": "user", "content": opening}]
        seconds: list[float] = []
        for turn in range(self.turns):
            began = perf_counter()
            async with http.post(f"{url}/v1/chat/completions", json={**asked, "messages": messages}) as answer:
                said = await answer.json()
            seconds.append(perf_counter() - began)
            if answer.status != 200 or said["usage"]["completion_tokens"] != len(self.ids):
                raise SystemExit(f"{self.name}, turn {turn}: {answer.status} {json.dumps(said)[:500]}")
            reply = {"role": "assistant", "content": said["choices"][0]["message"]["content"]}
            messages += [reply, {"role": "user", "content": f"The tool answers: {turn}. {self.text}"}]
        return seconds


@dataclass(frozen=True)
class Played:
    way: str
    sessions: int
    tokens_per_s: float
    p50_s: float
    p99_s: float


async def play(http: aiohttp.ClientSession, way: Way, sessions: int, run: int) -> Played:
    """All sessions at once, none of which begins as one of another run did: the engine's cache knows none of them."""
    began = perf_counter()
    openings = [f"Run {run} {way.name} {sessions}, session {number}. {way.text}" for number in range(sessions)]
    played = await asyncio.gather(*(way.converse(http, opening) for opening in openings))
    elapsed = perf_counter() - began
    seconds = sorted(each for session in played for each in session)
    tokens = len(seconds) * len(way.ids)
    return Played(way.name, sessions, tokens / elapsed, median(seconds), seconds[max(0, int(len(seconds) * 0.99) - 1)])


@asynccontextmanager
async def opened(options: argparse.Namespace, model_dir: Path) -> AsyncIterator[str]:
    """Where an SGLang answers that says what it is told: the one that is named, or one for the time of the block."""
    if options.engine is not None:
        yield options.engine
        return
    arguments = ("--context-length", str(CONTEXT), "--max-running-requests", str(max(options.sessions)))
    arguments += ("--max-total-tokens", str(CONTEXT * 12))
    spec = LaneSpec(LaneEngine.SGLANG, model_dir, dtype=Dtype(options.dtype), arguments=arguments)
    async with open_lane(spec, say=lambda line: print(line, file=sys.stderr)) as lane:
        yield lane.url


async def measure(options: argparse.Namespace, chat_tokenizer: ChatTokenizer, model_dir: Path) -> list[Played]:
    said = chat_tokenizer.tokenizer.encode(WORDS * options.tokens)[: options.tokens - 1]
    ids, text = [*said, chat_tokenizer.end_of_turn_id], chat_tokenizer.tokenizer.decode(said)
    with tempfile.TemporaryDirectory() as folder:
        served = ("--tokenizer", model_dir, "--store", f"{folder}/sessions.db", "--allow-forced-tokens")
        async with (
            opened(options, model_dir) as engine_url,
            harness_server("--engine", f"sglang={engine_url}", *served) as server,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600)) as http,
        ):
            direct, ours = (
                Way(name, url, model_dir.name, text, ids, options.turns)
                for name, url in (("direct", engine_url), ("harness", server.url))
            )
            for way in (direct, ours):
                await play(http, way, 2, -1)  # the first requests of a server compile what they need
            played: list[Played] = []
            for sessions in options.sessions:
                for run in range(options.pairs):
                    for way in (direct, ours) if run % 2 else (ours, direct):
                        played.append(await play(http, way, sessions, run))  # noqa: PERF401  # they are slow: one by one
    return played


def judge(played: Sequence[Played], sessions: int) -> Bar:
    """How many tokens a second are left of the direct run's: the median of the pairs."""
    direct, ours = (
        [each.tokens_per_s for each in played if (each.way, each.sessions) == (name, sessions)]
        for name in ("direct", "harness")
    )
    ratio = median(one / other for one, other in zip(ours, direct, strict=True))
    return Bar(f"{sessions} sessions, tokens a second by those of the direct run", ratio, LEAST, at_least=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=lambda text: [int(each) for each in text.split(",")], default=[8, 32])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=[each.value for each in Dtype], default="bfloat16")
    parser.add_argument("--engine", metavar="URL", help="an SGLang of `harness engine up` that runs, with that model")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    model_dir = resolve_model(options.model)
    played = asyncio.run(measure(options, open_chat_tokenizer(model_dir), model_dir))
    bars = [judge(played, sessions) for sessions in options.sessions]
    if options.json:
        found = [{**bar._asdict(), "holds": bar.holds} for bar in bars]
        print(json.dumps({"runs": [asdict(each) for each in played], "bars": found}, indent=1))
        return
    print(f"{'sessions':>8} {'way':>8} {'tokens/s':>9} {'p50 s':>7} {'p99 s':>7}")
    for each in played:
        print(f"{each.sessions:>8} {each.way:>8} {each.tokens_per_s:>9.0f} {each.p50_s:>7.2f} {each.p99_s:>7.2f}")
    print(*bars, sep="\n")


if __name__ == "__main__":
    main()
