"""Values of turns: their interval covers the truth, and samples carry them through every file."""

import json
from pathlib import Path

import numpy as np
import pytest

from harness.errors import ScenarioError
from harness.samples.codec import read_samples, write_parquet, write_samples
from harness.samples.turn_rewards import TurnValue, value_turns, values_of
from harness.suite.judge.groups import value_of
from harness.types import Sample
from tests.builders import sample
from tests.unit.samples.test_credit import EARNS, STATES, expected_reward, play_on, probabilities

VALUES = {0: TurnValue(0.5, 0.25, 0.75, 8), 2: TurnValue(-1.0, None, None, 1)}


def two_turns() -> Sample:
    """A sample of turns 0 and 2, with a token of context in between."""
    return sample(
        tokens=np.arange(7, dtype=np.int32),
        response_length=5,
        loss_mask=np.array([1, 1, 0, 1, 1], np.uint8),
        rollout_log_probs=np.zeros(5, np.float32),
        behavior_versions=np.array([0, 0, -1, 0, 0], np.int32),
        proximal_logprobs=np.zeros(5, np.float32),
        proximal_versions=np.array([0, 0, -1, 0, 0], np.int32),
        metadata={"turns": [0, 2], "spans": [[0, 2], [3, 5]]},
    )


def test_a_column_has_the_mean_and_metadata_the_interval(tmp_path: Path) -> None:
    """JSON Lines and Parquet keep both; a token without a value has none there."""
    import pyarrow.parquet as pq

    [valued] = value_turns([two_turns()], VALUES)
    write_samples([valued], tmp_path / "s.jsonl")
    write_parquet([valued], tmp_path / "s.parquet")
    [read] = read_samples(tmp_path / "s.jsonl")

    np.testing.assert_array_equal(read.turn_values, [0.5, 0.5, np.nan, -1.0, -1.0])
    assert read.metadata["turn_values"] == {
        "0": {"mean": 0.5, "low": 0.25, "high": 0.75, "forks": 8},
        "2": {"mean": -1.0, "low": None, "high": None, "forks": 1},
    }
    stored = [json.loads((tmp_path / "s.jsonl").read_text()), *pq.read_table(tmp_path / "s.parquet").to_pylist()]
    assert [each["turn_values"] for each in stored] == [[0.5, 0.5, None, -1.0, -1.0]] * 2
    assert values_of([read]) == {0: 0.5, 2: -1.0}


def test_a_turn_without_a_value_has_none() -> None:
    [valued] = value_turns([two_turns()], {2: VALUES[2]})

    np.testing.assert_array_equal(valued.turn_values, [np.nan] * 3 + [-1.0, -1.0])
    np.testing.assert_equal(values_of([valued]), {0: np.nan, 2: -1.0})


def test_a_value_of_no_turn_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"expected turns of the samples, \[0, 2\]; got turn 1"):
        value_turns([two_turns()], {1: VALUES[0]})


@pytest.mark.parametrize("forks", [4, 8, 32])
@pytest.mark.parametrize("binary", [True, False])
def test_the_interval_has_the_exact_value_for_95_of_100_turns(forks: int, binary: bool) -> None:
    """Of a game that can be enumerated, from each of its states; also for rewards of 0 and 1 alone."""
    rng = np.random.default_rng(forks)
    odds = probabilities(rng.normal(size=(STATES, len(EARNS))))
    inside = []
    for state in list(range(STATES)) * 60:
        exact = expected_reward(odds, state) / len(EARNS)
        if binary:
            rewards = [float(rng.random() < exact) for _ in range(forks)]
        else:
            rewards = [play_on(odds, state, rng) / len(EARNS) for _ in range(forks)]
        value = value_of(rewards)
        assert value is not None
        inside.append(value.low <= exact <= value.high)
    assert np.mean(inside) >= (0.93 if binary else 0.95)  # rewards of 0 and 1 have no slack: the mean of 300 varies


def test_rewards_beyond_0_to_1_have_students_interval() -> None:
    """One alone has none."""
    assert value_of([]) is None
    assert value_of([7.0]) == TurnValue(7.0, None, None, 1)
    found = value_of([1.0, 2.0, 3.0, 2.0, 2.0])
    assert found is not None
    assert (found.mean, found.forks) == (2.0, 5)
    assert found.high - found.mean == pytest.approx(2.776 * 0.5**0.5 / 5**0.5, rel=0.01)
