"""What the repeat guard costs per decode step, as a share of that step.

    python bench/repeat_guard.py [--json] [--model NAME_OR_DIR] [--device cuda]

For batches of 1, 32 and 256 sequences: a decode step of the local engine (greedy, the cheapest there is), and what the
guard adds to it, as the pure detector (the way the engines use it) and as the batched one (in a logits processor), with
every rule on. Both are measured in this run, so their ratio holds on a busy machine. With `--device cuda` the batched
detector runs there, alone.
"""

import argparse
import asyncio
import json
import statistics
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from time import perf_counter

import torch

from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.lab.models import resolve_model
from harness.types import GenerationDelta, GenerationRequest, SamplingParams, TokenIds, as_ids
from server_patch.repeat_terminate import RepeatDetector, RepeatTerminateConfig
from server_patch.repeat_terminate.huggingface import BatchedRepeatDetector

BATCHES = (1, 32, 256)
DECODE_STEPS = {1: 64, 32: 24, 256: 8}
GUARD_STEPS = 400
WARM_UP = 100
PROMPT_IDS = as_ids([1, 4093, 198, 2683, 198])
VOCABULARY = 49_152
CONFIG = RepeatTerminateConfig(enabled=True, max_object_keys=10**9)
KEY_IDS = [18, 4743, 79]
OFF = RepeatTerminateConfig()


@dataclass(frozen=True)
class Cost:
    """Median seconds of one step for one batch."""

    batch: int
    decode_s: float | None
    """None where there is no engine to decode with."""
    pure_s: float
    batched_s: float

    def share(self, seconds: float) -> str:
        """`seconds` as a share of the decode step."""
        return "-" if self.decode_s is None else f"{100 * seconds / self.decode_s:.3f} %"


async def decode_step_s(model_dir: Path, batch: int) -> float:
    """Median time between two tokens of one sequence while `batch` of them are decoded together."""
    async with HuggingFaceTokenProvider(model_dir, max_batch=batch, repeat_guard=OFF) as engine:
        gaps = await asyncio.gather(*(token_gaps(engine, PROMPT_IDS, DECODE_STEPS[batch]) for _ in range(batch)))
    return statistics.median(gaps[0][1:])


async def token_gaps(engine: HuggingFaceTokenProvider, ids: TokenIds, steps: int) -> list[float]:
    params = SamplingParams(steps, temperature=0.0, ignore_eos=True)
    times = [
        perf_counter()
        async for event in engine.stream(GenerationRequest(ids, params, request_id=uuid.uuid4().hex))
        if isinstance(event, GenerationDelta)
    ]
    return [after - before for before, after in pairwise(times)]


def pure_step_s(batch: int) -> float:
    random = Random(0)
    detectors = [RepeatDetector(CONFIG, KEY_IDS) for _ in range(batch)]
    rows = [[random.randrange(VOCABULARY) for _ in detectors] for _ in range(WARM_UP + GUARD_STEPS)]

    def step(index: int) -> None:
        for detector, token in zip(detectors, rows[index], strict=True):
            detector.push(token)

    return median_step_s(step)


def batched_step_s(batch: int, device: str) -> float:
    """A row of tokens pushed into one batched detector; what it launches is waited for."""
    torch.manual_seed(0)
    detector = BatchedRepeatDetector(CONFIG, batch, KEY_IDS, device=device)
    rows = torch.randint(VOCABULARY, (WARM_UP + GUARD_STEPS, batch), device=device)

    def step(index: int) -> None:
        detector.push(rows[index])
        if device != "cpu":
            torch.cuda.synchronize()

    return median_step_s(step)


def median_step_s(step: Callable[[int], None]) -> float:
    times = []
    for index in range(WARM_UP + GUARD_STEPS):
        began = perf_counter()
        step(index)
        times.append(perf_counter() - began)
    return statistics.median(times[WARM_UP:])


def measure(batch: int, model_dir: Path | None, device: str) -> Cost:
    decode_s = None if model_dir is None else asyncio.run(decode_step_s(model_dir, batch))
    return Cost(batch, decode_s, pure_step_s(batch), batched_step_s(batch, device))


def print_table(costs: list[Cost], device: str) -> None:
    batched = f"batched ({device})"
    print(f"{'batch':>6} {'decode step':>12} {'pure':>12} {'share':>10} {batched:>16} {'share':>10}")
    for cost in costs:
        decode = "-" if cost.decode_s is None else f"{cost.decode_s * 1e3:.1f} ms"
        pure, tensors = f"{cost.pure_s * 1e6:.1f} us", f"{cost.batched_s * 1e6:.1f} us"
        print(
            f"{cost.batch:>6} {decode:>12} {pure:>12} {cost.share(cost.pure_s):>10}"
            f" {tensors:>16} {cost.share(cost.batched_s):>10}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu", help="where the batched detector runs; not cpu: without the engine")
    options = parser.parse_args()
    model_dir = resolve_model(options.model) if options.device == "cpu" else None
    costs = [measure(batch, model_dir, options.device) for batch in BATCHES]
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
    else:
        print_table(costs, options.device)


if __name__ == "__main__":
    main()
