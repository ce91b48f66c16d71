"""What a turn may cost: the bars of the tool loop, and whether a run holds them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
