"""Figures of a trainer's steps, in the stores of metrics that the environment names.

HARNESS_REPORT lists stores, HARNESS_REPORT_DIR is their folder. A run of the trainer in the same store stays its own.
"""

import atexit
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import AdapterError
from harness.samples.rollout import stated_number
from harness.training.step_stores import ReportStep, StepStore, report_steps
from harness.types import Json

_stores = ExitStack()

STORES_VARIABLE, DIRECTORY_VARIABLE = "HARNESS_REPORT", "HARNESS_REPORT_DIR"


class ReportedSample(NamedTuple):
    """A trainer's sample: its reward, and the facts that the adapter stamped on it."""

    reward: float | None
    stamps: Json


def step_figures(samples: Iterable[ReportedSample]) -> dict[str, float]:
    """Return the figures of a step, under the keys of `harness train`."""
    sums: defaultdict[str, float] = defaultdict(float)
    means: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for reward, stamps in samples:
        share = stamps.get("weight", 1.0)  # a rollout's share reward and ledger, and sum to 1
        ledger = stamps.get("ledger", {"generated": 0, "trained": 0, "masked": 0, "dropped": {}})
        sums["train/samples_total"] += 1
        sums["stage2/raw_rollouts"] += share
        sums[f"rollout/{stamps.get('outcome', 'not_started')}"] += share
        sums["rollout/dropped_trailing_turns"] += stamps.get("dropped_trailing_turns", 0)
        sums["rollout/repeat_terminate_triggered_sequences"] += stamps.get("repeat_terminated", 0)
        for name in ("generated", "trained", "masked"):
            sums[f"ledger/{name}"] += share * ledger[name]
        for reason, tokens in ledger["dropped"].items():
            sums[f"dropped/{reason}"] += share * tokens
        if reward is not None:
            means["rollout/reward_mean"].append((share, reward))
        for name, figure in _figures_of(stamps).items():
            means[f"score/{name}"].append((share, figure))
    return dict(sums) | {
        key: sum(share * value for share, value in given) / total
        for key, given in means.items()
        if (total := sum(share for share, _ in given)) > 0
    }


def _figures_of(stamps: Json) -> Mapping[str, float]:
    # A data set may have a key `score` of its own.
    score = stamps.get("score")
    figures = score.get("figures") if isinstance(score, dict) else None
    given = figures if isinstance(figures, dict) else {}
    return {str(name): number for name, figure in given.items() if (number := stated_number(figure)) is not None}


def report_samples(steps: int, samples: Iterable[ReportedSample]) -> None:
    """Report a step of `samples` to the stores. Raises `AdapterError` naming a variable."""
    _open(os.environ.get(STORES_VARIABLE, ""), os.environ.get(DIRECTORY_VARIABLE, ""))(steps, step_figures(samples))


def log_rollout(
    rollout_id: int, args: Any, samples: Iterable[Any], _metrics: Mapping[str, Any] | None, _s: float
) -> bool:
    """Report a step of miles or slime, for `--custom-rollout-log-function-path`. Return False: they log as well."""
    rewards = ((each, None if each.reward is None else each.get_reward_value(args)) for each in samples)
    report_samples(
        rollout_id + 1, (ReportedSample(reward, each.metadata.get("harness", {})) for each, reward in rewards)
    )
    return False


def close_reports() -> None:
    """Close the stores; a later step opens them again."""
    _open.cache_clear()
    _stores.close()


@cache
def _open(names: str, directory: str) -> ReportStep:
    unknown = {*names.split()} - {*StepStore}
    if not names or unknown:
        raise AdapterError(f"{STORES_VARIABLE}: expected some of {' '.join(StepStore)}, got {names!r}")
    if not directory:
        raise AdapterError(f"{DIRECTORY_VARIABLE}: expected the folder of the stores {names}, got none")
    Path(directory).mkdir(parents=True, exist_ok=True)
    report = _stores.enter_context(report_steps([StepStore(name) for name in names.split()], Path(directory)))
    # Trainers tell when a step ends, and never that it was the last. Registered behind the stores' own handlers, so
    # that it runs before them.
    atexit.register(close_reports)
    return report
