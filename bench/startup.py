"""How long the command line takes to answer, beside a bare interpreter: the median of ten runs each."""

import statistics
import subprocess
import sys
from time import perf_counter

RUNS = 10


def median_ms(*arguments: str) -> float:
    """Milliseconds of one process, start to end."""
    seconds = []
    for _ in range(RUNS):
        began = perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        seconds.append(perf_counter() - began)
    return statistics.median(seconds) * 1e3


def main() -> None:
    bare = median_ms("-c", "pass")
    ours = median_ms("-m", "harness", "--help")
    print(f"python -c pass: {bare:.0f} ms, harness --help: {ours:.0f} ms, ratio {ours / bare:.1f} (wanted: < 300 ms)")


if __name__ == "__main__":
    main()
