"""From what a check says of single turns to the samples of a rollout, and on to what each turn has earned. Pure.

The reward of a rollout stays what it is: rewards of turns say which turn earned which part of it. What no turn is given
was earned by the last turn, so all estimators of `samples.credit` are about the same objective, the expected reward.
A penalty for a turn therefore belongs into the reward of the rollout, too.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.errors import ScenarioError
from harness.samples.delivery import turn_spans
from harness.types import Json, Sample

TurnRewards = Mapping[int | str, object]
"""By index of a turn (a number or its digits) or by the id of a tool call: that of the turn that made the call.

Finite numbers, of which several of one turn add up; None says nothing.
"""

_LARGEST = float(np.finfo(np.float32).max)


class RolloutReward(NamedTuple):
    """The reward of a rollout, and which turns earned it."""

    reward: float
    turns: TurnRewards


def reward_turns(
    samples: Sequence[Sample], session: Json, rewards: TurnRewards, total: float | None = None
) -> tuple[Sample, ...]:
    """Stamp `turn_rewards` and `returns` on the samples of a rollout; without `rewards` they stay as they are.

    Args:
        samples: All that are delivered of the session.
        session: Its record.
        rewards: Of turns.
        total: The reward of the rollout; None: the sum of `rewards`.

    Raises `ScenarioError` naming a turn that the session does not have or that no sample trains, a call that no turn or
    several have made, and a reward that is not finite.
    """
    if not rewards:
        return tuple(samples)
    trained, given = _trained_turns(samples), defaultdict[int, float](float)
    for key, reward in rewards.items():
        turn = _turn_of(key, session)
        if reward is None:
            continue
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= _LARGEST:  # nor NaN
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
    """Return what each trained turn of a rollout's `samples` has earned of its reward `total`; by index, in order.

    A rollout that trains no turn counts as one turn, -1.
    """
    given = {
        turn: reward
        for sample in samples
        for turn, reward in zip(sample.metadata.get("turns", ()), sample.turn_rewards, strict=False)
        if reward is not None
    }
    earned = {turn: given.get(turn, 0.0) for turn in sorted(_trained_turns(samples)) or [-1]}
    earned[max(earned)] += total - math.fsum(earned.values())
    return earned


def spread_over_tokens(sample: Sample, by_turn: Mapping[int, float]) -> npt.NDArray[np.float32]:
    """Give each response token the value of the turn that sampled it, and 0 where none did: float32 [response].

    Raises `ScenarioError` for a value that float32 cannot hold.
    """
    column = np.zeros(sample.response_length, dtype=np.float32)
    for turn, span in turn_spans(sample):
        value = by_turn.get(turn, 0.0)
        if not abs(value) <= _LARGEST:
            raise ScenarioError(f"turn {turn}: expected a finite float32, got {value}")
        column[span] = value
    column.flags.writeable = False
    return column


def _trained_turns(samples: Sequence[Sample]) -> set[int]:
    return {turn for each in samples for turn, span in turn_spans(each) if each.loss_mask[span].any()}


def _turn_of(key: int | str, session: Json) -> int:
    """The turn that `key` names."""
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
