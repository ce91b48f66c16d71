"""Turn rewards and values: what a turn earned of the reward, and what forks say of the state before it. Pure."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.errors import ScenarioError
from harness.samples.delivery import turn_spans
from harness.types import Json, Sample

TurnRewards = Mapping[int | str, object]
"""By turn index (number or digits) or tool call id. Several of one turn add up; None is ignored."""

_LARGEST = float(np.finfo(np.float32).max)


class TurnValue(NamedTuple):
    """Mean reward of forks of a turn, with its 95 % interval."""

    mean: float
    low: float | None
    """None if one reward says nothing about the others, as `high`."""
    high: float | None
    forks: int
    """With a reward."""


class RolloutReward(NamedTuple):
    """Reward of a rollout, of its turns, and why."""

    reward: float
    turns: TurnRewards
    figures: Mapping[str, float] = MappingProxyType({})
    """Parts of the judgement, by name."""
    reason: str = ""
    values: Mapping[int, TurnValue] = MappingProxyType({})
    """Values of states before turns (`value_turns`)."""


def reward_turns(
    samples: Sequence[Sample], session: Json, rewards: TurnRewards, total: float | None = None
) -> tuple[Sample, ...]:
    """Set `turn_rewards` and `returns` on all delivered samples of a session.

    Raises `ScenarioError` for an unknown or untrained turn, an ambiguous call id, or a reward that is not finite.
    """
    if not rewards:
        return tuple(samples)
    trained, given = _trained_turns(samples), defaultdict[int, float](float)
    for key, reward in rewards.items():
        turn = _turn_of(key, session)
        if reward is None:
            continue
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= _LARGEST:  # or NaN
            raise ScenarioError(f"turn_rewards[{key!r}]: expected a finite float32, got {reward!r:.60}")
        if turn not in trained:
            raise ScenarioError(
                f"turn_rewards[{key!r}]: expected a turn that is trained, and no sample trains turn {turn}; trained are"
                f" {sorted(trained)}"
            )
        given[turn] += reward
    stamped = [replace(each, turn_rewards=tuple(map(given.get, each.metadata["turns"]))) for each in samples]
    earned = earned_rewards(stamped, math.fsum(given.values()) if total is None else total)

    def returns_of(sample: Sample) -> npt.NDArray[np.float32]:
        return spread_over_tokens(
            sample, {turn: sum(earned[k] for k in earned if k >= turn) for turn in sample.metadata["turns"]}
        )

    return tuple(replace(each, returns=returns_of(each)) for each in stamped)


def earned_rewards(samples: Sequence[Sample], total: float) -> dict[int, float]:
    """Return the part of `total` that each trained turn earned, by ascending turn; without any, turn -1."""
    given = {
        turn: reward
        for sample in samples
        for turn, reward in zip(sample.metadata.get("turns", ()), sample.turn_rewards, strict=False)
        if reward is not None
    }
    earned = {turn: given.get(turn, 0.0) for turn in sorted(_trained_turns(samples)) or [-1]}
    # The last turn earns the rest, so all estimators of `samples.credit` share one objective, the expected reward.
    # Penalties of turns must therefore be in the rollout's reward too.
    earned[max(earned)] += total - math.fsum(earned.values())
    return earned


def spread_over_tokens(
    sample: Sample, by_turn: Mapping[int, float], *, missing: float = 0.0
) -> npt.NDArray[np.float32]:
    """Return float32 [response]: the value of each token's turn, or `missing`. Raises `ScenarioError` on overflow."""
    column = np.full(sample.response_length, missing, dtype=np.float32)
    for turn, span in turn_spans(sample):
        if (value := by_turn.get(turn)) is None:
            continue
        if not abs(value) <= _LARGEST:
            raise ScenarioError(f"turn {turn}: expected a finite float32, got {value}")
        column[span] = value
    column.flags.writeable = False
    return column


def _trained_turns(samples: Sequence[Sample]) -> set[int]:
    return {turn for each in samples for turn, span in turn_spans(each) if each.loss_mask[span].any()}


def _turn_of(key: int | str, session: Json) -> int:
    recorded = session["turns"]
    if isinstance(key, int) or key.isdecimal():
        found = [turn["turn"] for turn in recorded if turn["turn"] == int(key)]
    else:
        calls = ((turn["turn"], call.get("id")) for turn in recorded for call in turn["reply"].get("tool_calls") or ())
        found = [turn for turn, call_id in calls if call_id == key]
    if len(found) != 1:
        raise ScenarioError(
            f"turn_rewards[{key!r}]: expected the index of a turn, 0 to {len(recorded) - 1}, or the id of one of its"
            f" tool calls; {len(found)} turns fit"
        )
    return int(found[0])


def value_turns(samples: Sequence[Sample], values: Mapping[int, TurnValue]) -> tuple[Sample, ...]:
    """Set `turn_values` on all delivered samples of a session, by turn index; NaN for other turns and context.

    `metadata["turn_values"]` keeps `mean`, `low`, `high` and `forks`. Raises `ScenarioError` for an unknown turn or a
    value that is not finite.
    """
    if not values:
        return tuple(samples)
    known = {turn for sample in samples for turn, _ in turn_spans(sample)}
    if unknown := sorted(values.keys() - known):
        raise ScenarioError(f"turn_values: expected turns of the samples, {sorted(known)}; got turn {unknown[0]}")
    means = {turn: value.mean for turn, value in values.items()}
    return tuple(
        replace(
            sample,
            turn_values=spread_over_tokens(sample, means, missing=math.nan),
            metadata={**sample.metadata, "turn_values": _described(sample, values)},
        )
        for sample in samples
    )


def values_of(samples: Sequence[Sample]) -> dict[int, float]:
    """Return the values of a rollout's trained turns, in order; NaN for those without one."""
    found: dict[int, float] = {}
    for sample in samples:
        for turn, span in turn_spans(sample):
            if sample.loss_mask[span].any():
                found[turn] = float(sample.turn_values[span.start]) if sample.turn_values.size else math.nan
    return dict(sorted(found.items())) or {-1: math.nan}


def _described(sample: Sample, values: Mapping[int, TurnValue]) -> Json:
    return {str(turn): values[turn]._asdict() for turn, _ in turn_spans(sample) if turn in values}
