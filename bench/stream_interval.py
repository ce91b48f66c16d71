"""What it costs to ask for a whole answer in pieces: SGLang and vLLM with and without a stream interval, in one run.

    python bench/stream_interval.py sglang|vllm [--tokens 1024] [--batch 8] [--pairs 5] [--scored 0] [--json]
    python bench/stream_interval.py fake-sglang|fake-vllm ...

`--batch` answers of `--tokens` tokens at once, asked for as a whole and in pieces, in turns; which goes first changes
with every pair. Printed are the median times, the median of the pairs' ratios with their quartiles, and the CPU time of
this process for each answer; of a real engine the CPU time of its processes too, which says more than the clock where
others use the machine. A fake engine is in this process, and computes nothing.
`--scored` input tokens are scored besides, which SGLang repeats with every piece.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import NamedTuple
from uuid import uuid4

import psutil

from harness.engines.base import TokenProvider
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.engines.remote.vllm import VLLMTokenProvider
from harness.engines.scripted import ScriptStep
from harness.lanes import INSTALLED, Dtype, LaneEngine, LaneSpec, open_lane
from harness.machine.process_name import members
from harness.models import resolve_model
from harness.telemetry.logging import configure_logging
from harness.tokens.tokenizer import Tokenizer
from harness.types import GenerationDelta, GenerationRequest, SamplingParams, as_ids
from tests.fake_engines.fake_server import serving
from tests.fake_engines.providers import fake_provider, make_fake, scripted_engine

FAKES = ("fake-sglang", "fake-sglang-incremental", "fake-vllm")
PROVIDERS = {LaneEngine.SGLANG: SGLangTokenProvider, LaneEngine.VLLM: VLLMTokenProvider}
ROOM = {
    LaneEngine.SGLANG: ("--max-running-requests", "{batch}", "--context-length", "4096", "--max-total-tokens", "40000"),
    LaneEngine.VLLM: ("--max-num-seqs", "{batch}", "--max-model-len", "4096"),
}
PROMPT = [1, 43, 198, 83, 198]
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Cost:
    """One engine, whole against in pieces."""

    engine: str
    tokens: int
    batch: int
    whole_s: float
    pieces_s: float
    whole_cpu_ms: float
    """Of this process, for each answer."""
    pieces_cpu_ms: float
    whole_server_s: float
    """CPU time of the engine's processes, for each batch; 0 of a fake."""
    pieces_server_s: float
    server_ratio: float
    ratio: float
    ratio_low: float
    ratio_high: float
    pieces: float
    """Of an answer that came in pieces, beside its end."""


class Spent(NamedTuple):
    """On one batch."""

    seconds: float
    cpu_s: float
    """Of this process."""
    server_s: float
    """CPU time of the engine's processes."""


class Engine(NamedTuple):
    """An engine under measurement."""

    provider: TokenProvider
    group: int | None = None
    """The process group of its server; None when it is in this process."""

    def cpu_s(self) -> float:
        """CPU time that its processes have had; none of them ends meanwhile."""
        times = [psutil.Process(each.pid).cpu_times() for each in (() if self.group is None else members(self.group))]
        return sum(each.user + each.system for each in times)


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=[*INSTALLED, *FAKES])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--scored", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    configure_logging("error")
    async with opened(options.engine, options.model, options.batch) as engine:
        cost = await measure(engine, options)
    print(json.dumps(asdict(cost), indent=1) if options.json else as_row(cost))


@asynccontextmanager
async def opened(engine: str, model: str, batch: int) -> AsyncIterator[Engine]:
    """A provider over a server of its own."""
    if engine in FAKES:
        fake = make_fake(
            engine.removeprefix("fake-"), scripted_engine(ScriptStep(text="a stream " * 1000, token_delay_s=1e-6))
        )
        async with serving(fake, notices_disconnects=False), fake_provider(fake) as provider:
            yield Engine(provider)
        return
    kind, model_dir = LaneEngine(engine), resolve_model(model)
    room = tuple(argument.format(batch=batch) for argument in ROOM[kind])
    spec = LaneSpec(kind, model_dir, dtype=Dtype.FLOAT32, arguments=room, env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    vocab_size = Tokenizer.load(model_dir).vocab_size
    async with open_lane(spec, say=print) as lane, PROVIDERS[kind](lane.url, vocab_size=vocab_size) as provider:
        yield Engine(provider, lane.group)


async def measure(engine: Engine, options: argparse.Namespace) -> Cost:
    """Pairs of batches, after one that only warms up."""
    await spend(engine, options.batch, WARM_UP_TOKENS, options.scored, pieces=[])
    whole: list[Spent] = []
    divided: list[Spent] = []
    pieces: list[int] = []
    for pair in range(options.pairs):
        for in_pieces in (pair % 2 == 0, pair % 2 == 1):
            counted: list[int] | None = pieces if in_pieces else None
            spent = await spend(engine, options.batch, options.tokens, options.scored, counted)
            (divided if in_pieces else whole).append(spent)
    ratios = [each.seconds / base.seconds for each, base in zip(divided, whole, strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Cost(
        options.engine,
        options.tokens,
        options.batch,
        median(each.seconds for each in whole),
        median(each.seconds for each in divided),
        1e3 * median(each.cpu_s for each in whole) / options.batch,
        1e3 * median(each.cpu_s for each in divided) / options.batch,
        median(each.server_s for each in whole),
        median(each.server_s for each in divided),
        median(
            each.server_s / base.server_s if base.server_s else 0 for each, base in zip(divided, whole, strict=True)
        ),
        median(ratios),
        low,
        high,
        len(pieces) / options.batch / options.pairs,
    )


async def spend(engine: Engine, batch: int, tokens: int, scored: int, pieces: list[int] | None) -> Spent:
    """Until `batch` answers are there; asked for in pieces when somebody counts the `pieces`."""

    def count(piece: GenerationDelta) -> None:
        assert pieces is not None
        pieces.append(int(piece.output_ids.size))

    params = SamplingParams(tokens, temperature=1.0, ignore_eos=True)
    begun, begun_cpu, begun_server = perf_counter(), process_time(), engine.cpu_s()
    for result in await asyncio.gather(
        *(
            engine.provider.generate(
                GenerationRequest(
                    as_ids(PROMPT + [number % 200 for number in range(scored)]),
                    params,
                    request_id=uuid4().hex,
                    prompt_logprobs_from=len(PROMPT) if scored else None,
                    on_delta=None if pieces is None else count,
                )
            )
            for _ in range(batch)
        )
    ):
        assert result.output_ids.size == tokens
    return Spent(perf_counter() - begun, process_time() - begun_cpu, engine.cpu_s() - begun_server)


def as_row(cost: Cost) -> str:
    """A row of docs/engines.md, under its title."""
    title = (
        "| engine | answers | pieces of each | whole | in pieces | ratio (quartiles) | CPU time here | of the engine |"
    )
    cells = (
        cost.engine,
        f"{cost.batch} of {cost.tokens} tokens",
        f"{cost.pieces:.0f}",
        f"{cost.whole_s:.2f} s",
        f"{cost.pieces_s:.2f} s",
        f"{cost.ratio:.3f} ({cost.ratio_low:.3f} to {cost.ratio_high:.3f})",
        f"{cost.whole_cpu_ms:.1f} ms, {cost.pieces_cpu_ms:.1f} ms",
        f"{cost.whole_server_s:.1f} s, {cost.pieces_server_s:.1f} s ({cost.server_ratio:.3f})",
    )
    return "\n".join([title, "| " + " | ".join(["---"] * len(cells)) + " |", f"| {' | '.join(cells)} |"])


if __name__ == "__main__":
    asyncio.run(main())
