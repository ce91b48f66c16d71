"""What the repeat guard costs and saves inside real SGLang and vLLM, on this machine's CPU.

    python bench/repeat_guard_engines.py sglang|vllm [--dtype bfloat16] [--batches 1,32,256] [--json]

Starts the server twice, with the guard and without it. Both answer one batch: a greedy prompt that loops, and beside it
three that do not. The tokens and seconds of the first are what the guard saves; the ids of the others must be the same.
Then the guarded server decodes batches that never trip it, while the hook inside its scheduler is timed.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from uuid import uuid4

from harness.engines.base import TokenProvider
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.engines.remote.vllm import VLLMTokenProvider
from harness.lab.lanes import INSTALLED, Dtype, LaneEngine, LaneSpec, open_lane
from harness.lab.lanes.overlay import write_overlay
from harness.lab.models import resolve_model
from harness.tokens.tokenizer import Tokenizer
from harness.types import GenerationRequest, GenerationResult, SamplingParams, TokenIds, as_ids
from server_patch.repeat_terminate import RepeatTerminateConfig
from server_patch.repeat_terminate.config import ENABLE

TIMING = Path(__file__).resolve().parent / "guard_timing"
LIMITS = RepeatTerminateConfig(
    enabled=True,
    min_new_tokens=32,
    max_consecutive_token_repeats=16,
    ngram_size=16,
    ngram_repeats=2,
    max_object_keys=10**9,
)
"""Every rule is on; the last one is only paid for."""
LOOPING = "Chant: we will rock you!"
OTHERS = ("Say something.", "Write a poem about the sea.", "What is a lighthouse for?")
MAX_NEW_TOKENS, OTHER_TOKENS = 256, 64
STEPS = {1: 64, 32: 32, 256: 8}
SETTLED_S = 1.0  # the sums are written five times a second

PROVIDERS = {LaneEngine.SGLANG: SGLangTokenProvider, LaneEngine.VLLM: VLLMTokenProvider}
ROOM = {
    LaneEngine.SGLANG: ("--max-running-requests", "{batch}"),
    LaneEngine.VLLM: ("--max-num-seqs", "{batch}"),
}


@dataclass(frozen=True)
class Loop:
    """The sequence that loops, and the digest of its neighbors."""

    tokens: int
    finish_reason: str
    seconds: float
    others: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Cost:
    """The guard in one batch, per decode step."""

    batch: int
    step_ms: float
    guard_us: float

    @property
    def share_percent(self) -> float:
        """Of the step."""
        return self.guard_us / self.step_ms / 10


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=LaneEngine, choices=INSTALLED)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", type=Dtype, default=Dtype.FLOAT32)
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    batches = [int(size) for size in options.batches.split(",")]
    model_dir = resolve_model(options.model)
    tokenizer = Tokenizer.load(model_dir)
    with tempfile.TemporaryDirectory() as scratch:
        spec = timed_spec(options.engine, model_dir, options.dtype, max(batches), Path(scratch))
        async with served(spec, tokenizer, LIMITS) as guarded:
            on = await loop(guarded, tokenizer)
            costs = [await cost(guarded, batch, Path(scratch)) for batch in batches]
        async with served(spec, tokenizer, RepeatTerminateConfig()) as unguarded:
            off = await loop(unguarded, tokenizer)
    print(as_json(off, on, costs) if options.json else as_tables(options.engine, off, on, costs))


def timed_spec(engine: LaneEngine, model_dir: Path, dtype: Dtype, batch: int, scratch: Path) -> LaneSpec:
    """A lane with room for `batch` sequences, whose hooks are timed into `scratch`."""
    path = [TIMING, *write_overlay(engine, scratch / "overlay")]
    env = {"PYTHONPATH": ":".join(map(str, path)), "GUARD_TIMING_DIR": str(scratch)}
    room = tuple(argument.format(batch=batch) for argument in ROOM[engine])
    return LaneSpec(engine, model_dir, dtype=dtype, env=env, arguments=room)


@asynccontextmanager
async def served(spec: LaneSpec, tokenizer: Tokenizer, limits: RepeatTerminateConfig) -> AsyncIterator[TokenProvider]:
    """A server of `spec`, guarded when `limits` are enabled."""
    env = {**spec.env, **(limits.to_environ() if limits.enabled else {ENABLE: "0"})}
    lane_spec = LaneSpec(spec.engine, spec.model_dir, dtype=spec.dtype, env=env, arguments=spec.arguments)
    async with open_lane(lane_spec, say=print) as lane:
        provider = PROVIDERS[spec.engine](lane.url, vocab_size=tokenizer.vocab_size, repeat_guard=limits)
        async with provider as server:
            yield server


async def loop(server: TokenProvider, tokenizer: Tokenizer) -> Loop:
    """The prompt that loops, beside three that do not; greedy, because SGLang's seeds mean nothing on a CPU."""
    first = asyncio.ensure_future(timed(server, prompt(tokenizer, LOOPING), MAX_NEW_TOKENS))
    others = await asyncio.gather(*(timed(server, prompt(tokenizer, text), OTHER_TOKENS) for text in OTHERS))
    result, seconds = await first
    ids = tuple(tuple(other.output_ids.tolist()) for other, _ in others)
    return Loop(result.output_ids.size, str(result.finish_reason), seconds, ids)


async def cost(server: TokenProvider, batch: int, scratch: Path) -> Cost:
    """A batch of sampled sequences, which do not repeat themselves; the first pass only warms up."""
    steps = STEPS.get(batch, 32)
    for tokens in (4, steps):
        await asyncio.sleep(SETTLED_S)
        before, begun = spent_s(scratch), perf_counter()
        params = SamplingParams(tokens, temperature=1.0, ignore_eos=True)
        ids = as_ids([1, 4093, 198, 2683, 198])
        await asyncio.gather(
            *(server.generate(GenerationRequest(ids, params, request_id=uuid4().hex)) for _ in range(batch))
        )
        seconds = perf_counter() - begun
    await asyncio.sleep(SETTLED_S)
    return Cost(batch, 1e3 * seconds / steps, 1e6 * (spent_s(scratch) - before) / steps)


def spent_s(scratch: Path) -> float:
    """Seconds in the hooks of all processes until now."""
    return sum(json.loads(path.read_text())["spent_ns"] for path in scratch.glob("*.json")) / 1e9


async def timed(server: TokenProvider, ids: TokenIds, tokens: int) -> tuple[GenerationResult, float]:
    """A greedy generation and its seconds."""
    begun = perf_counter()
    params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
    return await server.generate(GenerationRequest(ids, params, request_id=uuid4().hex)), perf_counter() - begun


def prompt(tokenizer: Tokenizer, text: str) -> TokenIds:
    """What a user says."""
    return as_ids(tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"))


def as_json(off: Loop, on: Loop, costs: list[Cost]) -> str:
    """Everything that was measured."""
    costly = [asdict(each) | {"share_percent": each.share_percent} for each in costs]
    return json.dumps({"without": asdict(off), "with": asdict(on), "costs": costly}, indent=1)


def as_tables(engine: LaneEngine, off: Loop, on: Loop, costs: list[Cost]) -> str:
    """Return the figures as Markdown tables."""
    others = "unchanged" if on.others == off.others else "CHANGED"
    size = sum(map(len, on.others))
    rows = [
        "| engine | guard | output of the one that loops | seconds | ids of the others |",
        f"| {engine} | off | {off.tokens} tokens, `{off.finish_reason}` | {off.seconds:.1f} | |",
        f"| {engine} | on | {on.tokens} tokens, `{on.finish_reason}` | {on.seconds:.1f} | {others}, {size} tokens |",
        "",
        "| engine | batch | decode step | guard | share |",
    ]
    rows += [
        f"| {engine} | {each.batch} | {each.step_ms:.1f} ms | {each.guard_us:.1f} µs | {each.share_percent:.3f} % |"
        for each in costs
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    asyncio.run(main())
