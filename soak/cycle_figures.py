"""What cycles of aborts came to: sums and percentiles, in memory and in a file that later cycles are added to."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Figures:
    cycles: int = 0
    rollouts: int = 0
    samples: int = 0
    turns: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    cut_inside: Counter[str] = field(default_factory=Counter)
    """Sessions that went on behind a turn that was cut short, and their turns that the merge rule dropped for it."""
    seconds: float = 0.0
    abort_s: list[float] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    """What aborts said of engines and agents that did not do their part in the time that they were given."""
    wrong: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, run: Mapping[str, Any]) -> "Figures":
        """Those that `save` wrote, none without the file. Exits when they are those of another `run`."""
        if not path.exists():
            return cls()
        kept = json.loads(path.read_text())
        if kept["run"] != dict(run):
            raise SystemExit(
                f"{path}: expected the figures of {dict(run)}, got those of {kept['run']}; name another file"
            )
        figures = cls(**kept["figures"])
        for name in (name for name, each in vars(cls()).items() if isinstance(each, Counter)):
            setattr(figures, name, Counter(getattr(figures, name)))
        return figures

    def save(self, path: Path, run: Mapping[str, Any]) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"run": dict(run), "figures": vars(self)}))
        new.replace(path)

    def to_json(self) -> dict[str, Any]:
        summary = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
        times = sorted(summary.pop("abort_s"))
        longest = times[math.ceil(0.99 * (len(times) - 1))]
        return summary | {"abort_p50_s": statistics.median(times), "abort_p99_s": longest}
