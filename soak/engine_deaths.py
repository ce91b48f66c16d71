"""Real engines that are killed in the middle of decoding, while sessions go on at another one: whose tokens are whose?

Two servers of a kind stand behind one session server. Sessions have one long turn each; when the victim works on some
of them it gets SIGKILL, and their turns go on at the survivor. Then three books are compared that know nothing of
each other: the turns as they were recorded, the ledgers, and the survivor's own counter of sampled tokens. What the
victim takes with it is `unknown`: a request each, and no more tokens than were left of its budget. The victim is
restarted, and the next death comes.

    python soak/engine_deaths.py --engine sglang --deaths 5

Exits 1 when a ledger does not balance, a token was sampled twice, or the survivor has counted other tokens.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.engines.base import CountsTokens, EngineCount, TokenProvider
from harness.engines.connect import open_engine
from harness.engines.pool.pool import EnginePool
from harness.lab.lanes import LaneEngine, LaneSpec
from harness.lab.models import resolve_model
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from harness.suite.faults.seams import KillableLane
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import GenerationRequest, Json

PATIENCE_S = 300.0
_LOOK_S = 0.05


class Noted:
    """`inner`, and the ids of the requests that were sent to it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *how: Any) -> None:
        await self.inner.__aexit__(*how)

    async def generate(self, request: GenerationRequest) -> Any:
        self.asked.add(request.request_id)
        return await self.inner.generate(request)

    def stream(self, request: GenerationRequest) -> Any:
        self.asked.add(request.request_id)
        return self.inner.stream(request)

    async def count(self) -> EngineCount:
        assert isinstance(self.inner, CountsTokens)
        return await self.inner.count_sampled()


@dataclass
class DeathFigures:
    engine: str
    deaths: int = 0
    turns: int = 0
    turns_cut: int = 0
    """Those that were at the victim when it died."""
    tokens: int = 0
    """In the ledgers."""
    tokens_of_survivor: int = 0
    """Of these, sampled by the survivor, as the turns say."""
    counted_by_survivor: int = 0
    arrived_of_cut: int = 0
    """Tokens that requests had handed over before their engine died, and that are part of their turns."""
    unversioned: int = 0
    """Those that are not, because the engine had not said which weights sampled them."""
    unknown_requests: int = 0
    unknown_tokens: int = 0
    """The most that the dead engines can have kept."""
    sampled_and_lost: int = 0
    """The least that they have kept, by their own counters just before they died (vLLM counts while it samples)."""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


@dataclass
class Deaths:
    victim: Noted
    survivor: Noted
    lane: KillableLane
    http: httpx.AsyncClient
    options: argparse.Namespace
    chance: random.Random
    figures: DeathFigures

    async def die_once(self) -> None:
        """Sessions begin, the victim dies, its turns go on, the books are compared."""
        before, victim_before = await self.survivor.count(), await self.victim.count()
        asked_before = len(self.victim.asked)
        sessions = [await self._create() for _ in range(self.options.sessions)]
        talking = [asyncio.create_task(self._say(session)) for session in sessions]
        async with asyncio.timeout(PATIENCE_S):
            while len(self.victim.asked) == asked_before or not (await self.victim.health()).running:
                if all(each.done() for each in talking):
                    raise AssertionError([each.exception() for each in talking])
                await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(self.chance.uniform(*self.options.decode_s))
        victim_counted = (await self.victim.count()).tokens - victim_before.tokens
        await self.lane.kill()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*talking)
        records = [await self._record(session) for session in sessions]
        wrong = list(self._judge(records, victim_counted))
        wrong += await self._hear_survivor(records, before)
        self.figures.deaths += 1
        self.figures.wrong += [f"death {self.figures.deaths}: {line}" for line in wrong]

    def _judge(self, records: Sequence[Json], victim_counted: int) -> Sequence[str]:
        figures, wrong, at_most, handed = self.figures, [], 0, 0
        cut = 0
        for record in records:
            [turn], ledger = record["turns"], record["ledger"]
            segments, size = turn["segments"], len(turn["output_ids"])
            joints = [each["end"] for each in segments]
            if turn["status"] not in ("completed", "truncated"):
                wrong.append(f"a turn is {turn['status']}")
            if [each["start"] for each in segments] != [0, *joints[:-1]] or joints[-1] != size:
                wrong.append(f"segments overlap or leave gaps: {segments}")
            if len({each["request_id"] for each in segments}) != len(segments):
                wrong.append("a request is in two segments")
            gone = ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
            lost = {each["request_id"] for each in turn["unknown"]}
            # What came of a vLLM that dies before it has said which weights sampled it: handed over, and not usable.
            unversioned = ledger["dropped"].get("unversioned", 0) if lost else 0
            if not ledger["generated"] == gone == size + unversioned:
                wrong.append(f"the turn has {size} tokens, its ledger {ledger}")
            figures.unversioned += unversioned
            handed += unversioned
            if not lost <= self.victim.asked:
                wrong.append(f"requests of the survivor are unknown: {lost - self.victim.asked}")
            handed += tokens_of(segments, self.victim.asked)
            figures.arrived_of_cut += tokens_of(segments, lost)
            at_most += sum(each["at_most"] for each in turn["unknown"])
            cut += bool(lost)
            figures.unknown_requests += len(lost)
            figures.turns += 1
            figures.tokens += ledger["generated"]
        if not cut:
            wrong.append("the victim died with nothing in flight: let its turns be longer (--tokens)")
        kept = max(0, victim_counted - handed)
        if kept > at_most:
            wrong.append(f"the victim had sampled {kept} tokens that nobody got, unknown says at most {at_most}")
        figures.turns_cut += cut
        figures.unknown_tokens += at_most
        figures.sampled_and_lost += kept
        return wrong

    async def _hear_survivor(self, records: Sequence[Json], before: EngineCount) -> list[str]:
        """The survivor's counter against the segments that it sampled."""
        segments = [each for record in records for turn in record["turns"] for each in turn["segments"]]
        recorded = tokens_of(segments, self.survivor.asked)
        deadline = perf_counter() + 10
        after = await self.survivor.count()
        while after.tokens - before.tokens != recorded and perf_counter() < deadline:  # it may be a moment behind
            await asyncio.sleep(_LOOK_S)
            after = await self.survivor.count()
        counted = after.tokens - before.tokens
        self.figures.tokens_of_survivor += recorded
        self.figures.counted_by_survivor += counted
        if after.start != before.start:
            return ["the survivor was restarted"]
        return [] if counted == recorded else [f"the survivor counted {counted} tokens, the turns have {recorded}"]

    async def _create(self) -> Any:
        sampling = {"max_tokens": self.options.tokens, "temperature": 1.0}
        answer = (await self.http.post("/sessions", json={"sampling": sampling})).raise_for_status()
        return answer.json()

    async def _say(self, session: Json) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": f"Number {self.chance.random()}"}]}
        headers = {"authorization": f"Bearer {session['api_key']}"}
        url = f"{session['base_url']}/v1/chat/completions"
        (await self.http.post(url, json=body, headers=headers)).raise_for_status()

    async def _record(self, session: Json) -> Any:
        answer = (await self.http.get(f"/sessions/{session['session_id']}?ids=prompts")).raise_for_status()
        return answer.json()


def tokens_of(segments: Sequence[Json], requests: set[str]) -> int:
    return sum(each["end"] - each["start"] for each in segments if each["request_id"] in requests)


async def run(options: argparse.Namespace) -> DeathFigures:
    began, model, kind = perf_counter(), resolve_model(options.model), LaneEngine(options.engine)
    chat_tokenizer, figures = open_chat_tokenizer(model), DeathFigures(options.engine)
    async with AsyncExitStack() as stack:
        lanes = [await stack.enter_async_context(KillableLane(LaneSpec(kind, model), _say)) for _ in range(2)]
        urls = [f"{lane.provider.partition('=')[0]}={lane.url}" for lane in lanes]
        engines = [Noted(open_engine(url, tokenizer=chat_tokenizer.tokenizer)) for url in urls]
        workers: list[Any] = list(engines)
        pool: TokenProvider = EnginePool(workers)
        serving = serve(pool, chat_tokenizer, MemoryStore(), ServerSettings(engine_attempts=5))
        server = await stack.enter_async_context(serving)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S))
        victim, survivor = engines
        deaths = Deaths(victim, survivor, lanes[0], http, options, random.Random(options.seed), figures)
        for number in range(1, options.deaths + 1):
            await deaths.die_once()
            _say(f"{number} deaths, {perf_counter() - began:.0f} s")
            if number < options.deaths:
                await lanes[0].start()
    figures.seconds = perf_counter() - began
    return figures


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", default="sglang", choices=[each.value for each in LaneEngine])
    parser.add_argument("--deaths", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=4, help="turns in flight when the victim dies, on both")
    parser.add_argument("--model", default="tiny-random-qwen3")
    parser.add_argument("--tokens", type=int, default=300, help="output tokens of a turn at most")
    parser.add_argument(
        "--decode-s", type=float, nargs=2, default=(0.2, 1.0), help="how long the victim decodes before it dies"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = _options()
    figures = asyncio.run(run(options))
    print(json.dumps(asdict(figures)))
    sys.exit(bool(figures.wrong))


if __name__ == "__main__":
    main()
