"""Pictures of a run: latency by turn, and CPU a turn by context length; one line for each server."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.tool_loop.bars import Figures


def write_plots(report: Sequence[Figures], tokens_per_turn: int, folder: Path) -> list[Path]:
    """Two PNG files for each shape of load in `report`. Raises `SystemExit` when matplotlib is missing."""
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for sessions, turns in sorted({(each.sessions, each.turns) for each in report}):
        of_shape = [each for each in report if (each.sessions, each.turns) == (sessions, turns)]
        latency, latency_axes = pyplot.subplots()
        cpu, cpu_axes = pyplot.subplots()
        for each in of_shape:
            latency_axes.plot(range(1, turns + 1), each.latency_ms_by_turn, label=each.server)
            tenths = len(each.cpu_ms_by_tenth)
            contexts = [(tenth + 0.5) / tenths * turns * tokens_per_turn for tenth in range(tenths)]
            cpu_axes.plot(contexts, each.cpu_ms_by_tenth, label=each.server)
        title = f"{sessions} sessions of {turns} turns"
        latency_axes.set(title=title, xlabel="turn", ylabel="median latency, ms", ylim=(0, None))
        cpu_axes.set(title=title, xlabel="tokens of context", ylabel="CPU of the server a turn, ms", ylim=(0, None))
        for figure, axes, name in ((latency, latency_axes, "latency"), (cpu, cpu_axes, "cpu")):
            axes.legend()
            written.append(folder / f"{name}_{sessions}x{turns}.png")
            figure.savefig(written[-1], dpi=120)
            pyplot.close(figure)
    return written


def load_pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SystemExit(f"--plots needs matplotlib ({error}): pip install 'session-harness[plots]'") from error
    mpl.use("Agg")  # a machine that measures has no screen
    from matplotlib import pyplot as plt

    return plt
