"""Metric keys of a report's figures, and the points that a metric store gets."""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.suite.record.rundir import RunDirectory
from harness.suite.training.report import TELEMETRY_FILE, read_telemetry
from harness.viewer.run_view import SessionLine
from harness.viewer.session_figures import SessionFigures

STATISTICS = ("count", "mean", "min", "median", "p95", "max")
"""Values of `STAT` in keys."""

METRICS: Mapping[str, str] = {
    "report/sessions": "sessions of the run",
    "report/outcome/OUTCOME": "sessions with that outcome",
    "report/reward/SCENARIO/STAT": "rewards of the scenario's sessions",
    "report/pass_at/SCENARIO/K": "estimate that one of K samples of a prompt passes: has reward 1 or more",
    "report/session_turns/STAT": "turns of a session",
    "report/session_tokens/STAT": "sampled tokens of a session",
    "report/turn_tokens/STAT": "sampled tokens of a turn",
    "report/prompt_tokens/STAT": "prompt tokens of a turn",
    "report/turn_seconds/STAT": "seconds of a turn",
    "report/held_seconds/STAT": "seconds of a turn at the gate",
    "report/queued_seconds/STAT": "seconds of a turn in the queue of a pool",
    "report/engine_seconds/STAT": "seconds of a turn with an engine",
    "report/server_seconds/STAT": "seconds of a turn in the session server",
    "report/between_seconds/STAT": "seconds between two turns: agent and tools",
    "report/turn_tokens_per_second/STAT": "sampled tokens a second of a turn",
    "report/run_tokens_per_second": "sampled tokens a second of all sessions",
    "report/turn_end/END": "turns with that end",
    "report/tokens/trained": "sampled tokens that are trained",
    "report/tokens/masked": "sampled tokens that are masked",
    "report/tokens/unknown": "upper bound of tokens that were sampled but never received",
    "report/dropped/REASON": "sampled tokens that are dropped for that reason",
    "report/version_lag/VERSIONS": "sampled tokens by versions behind the newest",
    "report/audit/CAUSE": "nats of the gap between engine and trainer that a cause explains",
    "session/reward": "reward of a session; the step is its number",
    "session/turns": "its turns",
    "session/tokens": "its sampled tokens",
    "session/seconds": "from its first turn to its last",
}
"""Keys and their meanings. Words in capitals stand for names in the run. A run also has the keys of a trainer's log
(`rollout/...`, `train/...`), by training step.
"""

_LONGEST = 100  # characters of a part
_STRANGE = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """Figures of one step: the run, a session, or a training step."""

    kind: str
    """`run`, `session` or `training`. Each kind counts its own steps."""
    step: int
    at: float
    """Unix seconds."""
    figures: Mapping[str, float]


def key_of(*parts: object) -> str:
    """Return the key of `parts`, with `_` for characters that some store refuses."""
    return "/".join(_STRANGE.sub("_", str(part)[:_LONGEST]) for part in parts)


def keep_numbers(figures: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers of `figures`."""
    numbers = ((key, value) for key, value in figures.items() if isinstance(value, int | float))
    return {key: float(value) for key, value in numbers if math.isfinite(value)}


def session_point(place: int, line: SessionLine, facts: SessionFigures) -> MetricPoint:
    """Return the point of a session. Without a number its step is `place`."""
    figures = {
        "session/reward": line.reward,
        "session/turns": len(facts.seconds),
        "session/tokens": sum(facts.outputs),
        "session/seconds": sum(facts.seconds) + sum(facts.between),
    }
    return MetricPoint("session", place if line.number is None else line.number, facts.ended_at, keep_numbers(figures))


def training_points(path: Path) -> list[MetricPoint]:
    """Return a point for each step of a training run; none for another run. Raises `StoreError`, `ValueError`."""
    if not (path / TELEMETRY_FILE).is_file():
        return []
    steps = read_telemetry(RunDirectory(path), sys.maxsize)
    return [MetricPoint("training", step, 0.0, keep_numbers(figures)) for step, figures in enumerate(steps)]
