"""How full packs are, and what planning them costs.

    python bench/packing.py [--json] [--samples FILE]

Efficiency is `fewest_packs` over the packs of a plan: the bound (Martello and Toth's L2, never below the sum of lengths
over the packing length) that no plan goes below. Pools are packed by `plan_packs`, streams by `PackStream` with a
look-ahead of 64. Seeded: the same command gives the same packs.

Lengths of real runs are the published ones of 15 000 sessions of coding agents (SWE-rebench with OpenHands, SWE-smith,
Klear): tokens of the deepest prompt, https://huggingface.co/datasets/thoughtworks/agentic-coding-trajectories, drawn
evenly inside each published range. `--samples` takes the `samples.jsonl` of a run instead, each length drawn again and
again; a pack then holds four times the longest.

The adversarial pools are hard for best fit or for streams, and made so that a plan with as many packs as the bound
exists, or all but one of them. `loose bound` is the exception: lengths between a quarter and a half of a pack, of which
few threes fit together, so the bound tells little.
"""

import argparse
import json
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import process_time

import numpy as np
import numpy.typing as npt

from harness import read_samples
from harness.samples.packing import fewest_packs
from harness.training import PackStream, Segment, plan_packs

PACKING_LENGTH = 131_072
LOOKAHEAD = 64
POOLS = (1_000, 4_000, 16_000)
MILLION = 1_000_000

CODING_SESSIONS = (
    (0.00, 1),
    (0.07, 8_192),
    (0.35, 16_384),
    (0.50, 23_840),
    (0.62, 32_768),
    (0.94, 65_536),
    (0.95, 69_274),
    (0.99, 89_876),
    (1.00, PACKING_LENGTH),
)
"""Share of sessions that are no longer than so many tokens; where the last one ends is not published."""

Lengths = npt.NDArray[np.int64]
Draw = Callable[[np.random.Generator, int, int], Lengths]


@dataclass(frozen=True)
class Packed:
    lengths: str
    how: str
    segments: int
    packs: int
    bound: int
    seconds: float
    """CPU time: one thread, so it is what an idle machine takes."""

    @property
    def efficiency(self) -> float:
        return self.bound / self.packs


def draw_coding_sessions(rng: np.random.Generator, count: int, packing_length: int) -> Lengths:
    """Lengths of coding agents' sessions, in units of a pack of 131 072 tokens."""
    shares, tokens = zip(*CODING_SESSIONS, strict=True)
    return np.ceil(np.interp(rng.random(count), shares, tokens) * packing_length / PACKING_LENGTH).astype(np.int64)


def draw_again(recorded: Lengths, rng: np.random.Generator, count: int, _packing_length: int) -> Lengths:
    """Lengths that were met, each of them any number of times."""
    return rng.choice(recorded, count)


def cut_packs(rng: np.random.Generator, count: int, packing_length: int, parts: tuple[int, int]) -> Lengths:
    """Full packs, each cut into a few parts at random places."""
    lengths: list[int] = []
    while len(lengths) < count:
        cuts = rng.choice(packing_length - 1, rng.integers(parts[0], parts[1] + 1) - 1, replace=False) + 1
        lengths += np.diff([0, *np.sort(cuts), packing_length]).tolist()
    return np.asarray(lengths)


def draw_triplets(rng: np.random.Generator, count: int, packing_length: int) -> Lengths:
    """Three that fill a pack, each between a quarter and a half of it (Falkenauer 1996): two never leave much room."""
    longest = rng.integers(round(0.38 * packing_length), round(0.49 * packing_length) + 1, count // 3)
    least = packing_length // 4 + 1
    second = least + (rng.random(count // 3) * ((packing_length - longest) // 2 - least)).astype(np.int64)
    return np.concatenate([longest, second, packing_length - longest - second])


def draw_johnson(_rng: np.random.Generator, count: int, packing_length: int) -> Lengths:
    """The pattern of which best fit makes eleven packs where nine hold it (Johnson 1974)."""
    half, quarter, more = packing_length // 2, packing_length // 4, packing_length // 100
    pattern = [half + more] * 6 + [quarter + 2 * more] * 6 + [quarter + more] * 6 + [quarter - 2 * more] * 12
    return np.tile(pattern, count // len(pattern) + 1)


ADVERSARIAL: dict[str, Draw] = {
    "triplets": draw_triplets,
    "Johnson": draw_johnson,
    "packs cut into 2 to 5": lambda rng, count, length: cut_packs(rng, count, length, (2, 5)),
    "packs cut into 3 or 4": lambda rng, count, length: cut_packs(rng, count, length, (3, 4)),
    "just over half": lambda rng, count, length: rng.integers(length // 2 + 1, round(0.6 * length), count),
}

LOOSE: dict[str, Draw] = {"loose bound": lambda rng, count, length: rng.integers(length // 4 + 1, length // 2, count)}


def pack_pool(name: str, lengths: Lengths, packing_length: int) -> Packed:
    began = process_time()
    packs = len(plan_packs(lengths, packing_length))
    seconds = process_time() - began
    return Packed(name, "pool", lengths.size, packs, fewest_packs(lengths, packing_length), seconds)


def pack_stream(name: str, lengths: Lengths, packing_length: int) -> Packed:
    """One by one, in this order; the segments hold nothing but tokens."""
    segments = (_empty_segment(length) for length in lengths.tolist())
    stream = PackStream(packing_length, LOOKAHEAD)
    began = process_time()
    packs = sum(stream.add(segment) is not None for segment in segments) + sum(1 for _ in stream.finish())
    seconds = process_time() - began
    return Packed(name, f"stream, {LOOKAHEAD}", lengths.size, packs, fewest_packs(lengths, packing_length), seconds)


def _empty_segment(length: int) -> Segment:
    zeros, minus = np.zeros(length, np.float32), np.full(length, -1, np.int32)
    return Segment(np.zeros(length, np.int32), np.zeros(length, np.uint8), zeros, zeros, zeros, minus, minus)


def pack_million() -> tuple[Packed, float]:
    """A million lengths of real runs, and the most MiB that this process had."""
    lengths = draw_coding_sessions(np.random.default_rng(0), MILLION, PACKING_LENGTH)
    packed = pack_pool("coding sessions", lengths, PACKING_LENGTH)
    return packed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(samples: Path | None) -> Iterator[Packed]:
    """Every pool and stream, in the order of the printed table."""
    rng = np.random.default_rng(0)
    name, packing_length = "coding sessions", PACKING_LENGTH
    real: Draw = draw_coding_sessions
    if samples is not None:
        recorded = np.asarray([sample.tokens.size for sample in read_samples(samples)])
        name, packing_length = samples.name, 4 * int(recorded.max())
        real = partial(draw_again, recorded)
    for count in POOLS:
        yield pack_pool(name, real(rng, count, packing_length), packing_length)
    for count in POOLS[:2]:
        yield pack_stream(name, real(rng, count, packing_length), packing_length)
    for name, draw in (ADVERSARIAL | LOOSE).items():
        for count in POOLS:
            yield pack_pool(name, draw(rng, count, PACKING_LENGTH), PACKING_LENGTH)
    for name, draw in ADVERSARIAL.items():
        yield pack_stream(name, rng.permutation(draw(rng, POOLS[0], PACKING_LENGTH)), PACKING_LENGTH)
    yield pack_stream(
        "coding sessions, sorted", np.sort(draw_coding_sessions(rng, 1000, PACKING_LENGTH)), PACKING_LENGTH
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--samples", type=Path, help="samples.jsonl of a run, for its lengths")
    options = parser.parse_args()
    if not options.json:
        print("wanted: pools >= 0.98; streams of real lengths >= 0.95; a million under 5 s and 500 MiB\n")
        print(f"{'lengths':26}{'how':12}{'segments':>9}{'packs':>8}{'bound':>8}{'efficiency':>12}{'CPU s':>9}")
    rows = []
    for row in measure(options.samples):
        rows.append(asdict(row) | {"efficiency": row.efficiency})
        if not options.json:
            _print(row)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:  # its memory is the plan's alone
        million, mib = process.submit(pack_million).result()
    if options.json:
        print(json.dumps({"packed": rows, "million": asdict(million) | {"mib": mib}}, indent=2))
    else:
        _print(million)
        print(f"most memory of the process that packed a million: {mib:.0f} MiB")


def _print(row: Packed) -> None:
    print(
        f"{row.lengths:26}{row.how:12}{row.segments:9}{row.packs:8}{row.bound:8}{row.efficiency:12.4f}{row.seconds:9.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
