"""What a turn costs and may cost: the figures of a run, its bars, and its pictures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

STREAMED = "streamed"
"""The session server with a store in a file, asked for streams."""


@dataclass(frozen=True)
class Figures:
    server: str
    sessions: int
    turns: int
    cpu_ms_per_turn: float
    """Of the server."""
    driver_cpu_ms_per_turn: float
    engine_cpu_ms_per_turn: float
    turns_per_s: float
    p50_ms: float
    p99_ms: float
    early_ms: float
    """Median of turns 2 to 6."""
    late_ms: float
    """Median of the last five."""
    rss_mib: float
    started_rss_mib: float
    others_cores: float
    """Cores that everything else on the machine was on meanwhile."""
    latency_ms_by_turn: tuple[float, ...]
    cpu_ms_by_tenth: tuple[float, ...]
    """CPU of the server a turn, in each tenth of the run: contexts grow from one to the next."""


class Bar(NamedTuple):
    what: str
    found: float
    bound: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.found >= self.bound if self.at_least else self.found <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{self.what}: {self.found:.2f} (wanted: {sign} {self.bound:g}): {'holds' if self.holds else 'MISSED'}"


def judge(report: Sequence[Figures]) -> Iterator[Bar]:
    """The bars of the shapes that have one, as far as `report` has what they compare; the last run of each counts."""
    found = {(each.sessions, each.turns, each.server): each for each in report}
    many, proxy = found.get((32, 50, "sqlite")), found.get((32, 50, "proxy"))
    if many and proxy:
        yield Bar("32 x 50, times the proxy's", many.cpu_ms_per_turn / proxy.cpu_ms_per_turn, 10)
        yield Bar("32 x 50, p99, ms", many.p99_ms, 120)
    one, proxy = found.get((1, 50, "sqlite")), found.get((1, 50, "proxy"))
    if one and proxy:
        late = one.late_ms - max(0.0, proxy.late_ms - proxy.early_ms)
        yield Bar("1 x 50, last five turns by turns 2 to 6, the proxy's growth taken out", late / one.early_ms, 1.2)
    for shape in ((32, 50), (1, 50)):
        whole, streamed = found.get((*shape, "sqlite")), found.get((*shape, STREAMED))
        if whole and streamed:
            ratio = streamed.cpu_ms_per_turn / whole.cpu_ms_per_turn
            yield Bar(f"{shape[0]} x {shape[1]}, CPU of streamed answers by that of whole ones", ratio, 1.3)


def new_figure() -> Any:
    """An empty picture of matplotlib's. Raises `SystemExit` when that is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"--plots needs matplotlib ({error}): pip install 'session-harness[plots]'") from error
    return Figure()


def write_plots(report: Sequence[Figures], tokens_per_turn: int, folder: Path) -> list[Path]:
    """Latency by turn and CPU a turn by context length: two PNG files for each shape of load."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for sessions, turns in sorted({(each.sessions, each.turns) for each in report}):
        pictures = {"latency": new_figure(), "cpu": new_figure()}
        latency, cpu = (figure.subplots() for figure in pictures.values())
        for each in (each for each in report if (each.sessions, each.turns) == (sessions, turns)):
            latency.plot(range(1, turns + 1), each.latency_ms_by_turn, label=each.server)
            tenths = len(each.cpu_ms_by_tenth)
            contexts = [(tenth + 0.5) / tenths * turns * tokens_per_turn for tenth in range(tenths)]
            cpu.plot(contexts, each.cpu_ms_by_tenth, label=each.server)
        title = f"{sessions} sessions of {turns} turns"
        latency.set(title=title, xlabel="turn", ylabel="median latency, ms", ylim=(0, None))
        cpu.set(title=title, xlabel="tokens of context", ylabel="CPU of the server a turn, ms", ylim=(0, None))
        for name, figure in pictures.items():
            figure.axes[0].legend()
            written.append(folder / f"{name}_{sessions}x{turns}.png")
            figure.savefig(written[-1], dpi=120)
    return written
