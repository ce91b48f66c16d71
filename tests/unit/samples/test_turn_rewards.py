"""What a check says of turns reaches the tokens that these turns sampled; what is not supported is refused by name."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import ScenarioError
from harness.samples.codec import sample_from_binary, sample_from_json, sample_to_binary, sample_to_json
from harness.samples.miles_codec import cut_sample
from harness.samples.turn_rewards import earned_rewards, reward_turns, spread_over_tokens
from harness.types import Json, Sample, as_ids, as_logprobs
from tests.builders import sample

CONTEXT, OUTPUT = 2, 3


def branch(turns: Sequence[int], masked: Sequence[int] = ()) -> Sample:
    """A sample of these turns: the first one's prompt, then three tokens by each, with two of context in between."""
    spans = [[place * (CONTEXT + OUTPUT), place * (CONTEXT + OUTPUT) + OUTPUT] for place in range(len(turns))]
    length = spans[-1][1]
    mask, versions = np.zeros(length, np.uint8), np.full(length, -1, np.int32)
    for turn, (start, end) in zip(turns, spans, strict=True):
        mask[start:end] = turn not in masked
        versions[start:end] = 0
    logprobs = as_logprobs(np.where(versions == 0, -0.5, 0.0))
    return sample(
        tokens=as_ids(range(CONTEXT + length)),
        response_length=length,
        loss_mask=mask,
        rollout_log_probs=logprobs,
        behavior_versions=versions,
        proximal_logprobs=logprobs,
        proximal_versions=versions,
        metadata={"turns": list(turns), "spans": spans},
    )


def session(*calls: Sequence[str]) -> Json:
    """The record of a session whose turns make the calls with these ids."""
    return {
        "turns": [
            {"turn": turn, "reply": {"role": "assistant", "tool_calls": [{"id": each} for each in ids]}}
            for turn, ids in enumerate(calls)
        ]
    }


RECORD = session(["a"], ["b", "c"], [], ["d"])


def by_span(of: Sample) -> list[list[float]]:
    """The returns of each turn's tokens."""
    return [of.returns[start:end].tolist() for start, end in of.metadata["spans"]]


def test_rewards_by_index_and_by_call_reach_the_tokens_of_their_turns():
    """A turn's calls add up; the reward that no turn is given was earned by the last one."""
    [stamped] = reward_turns([branch([0, 1, 3])], RECORD, {0: 0.25, "b": 0.5, "c": -0.25, "3": None}, 2.0)
    assert stamped.turn_rewards == (0.25, 0.25, None)
    assert by_span(stamped) == [[2.0] * 3, [1.75] * 3, [1.5] * 3]
    assert stamped.returns.dtype == np.float32
    assert stamped.returns.sum() == 3 * (2.0 + 1.75 + 1.5)
    assert list(earned_rewards([stamped], 2.0).items()) == [(0, 0.25), (1, 0.25), (3, 1.5)]
    assert stamped.reward is None


def test_without_a_reward_of_the_rollout_it_is_the_sum():
    """`collect(turn_rewards=...)` knows no other."""
    [stamped] = reward_turns([branch([0, 1])], RECORD, {0: 1.0, 1: 0.5})
    assert by_span(stamped) == [[1.5] * 3, [0.5] * 3]


def test_nothing_said_changes_nothing():
    """A check without rewards of turns leaves samples as they are; then the last turn has earned all."""
    samples = [branch([0, 1, 2])]
    assert reward_turns(samples, RECORD, {}, 1.0)[0] is samples[0]
    assert (samples[0].turn_rewards, samples[0].returns.tolist()) == ((), [])
    assert earned_rewards(samples, 1.0) == {0: 0.0, 1: 0.0, 2: 1.0}


def test_a_turn_of_several_samples_has_its_reward_in_each_and_earns_it_once():
    samples = reward_turns([branch([0, 1]), branch([0, 2], masked=[0])], RECORD, {0: 1.0, 1: 2.0, 2: 4.0}, 7.0)
    assert [each.turn_rewards for each in samples] == [(1.0, 2.0), (1.0, 4.0)]
    assert by_span(samples[1]) == [[7.0] * 3, [4.0] * 3]
    assert earned_rewards(samples, 7.0) == {0: 1.0, 1: 2.0, 2: 4.0}


def test_a_rollout_that_trains_no_turn_counts_with_its_reward():
    assert earned_rewards([branch([0], masked=[0])], 0.5) == {-1: 0.5}
    assert earned_rewards([], 0.5) == {-1: 0.5}


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({7: 1.0}, r"turn_rewards\[7\]: expected the index of a turn, 0 to 3, .*; 0 turns fit"),
        ({"-1": 1.0}, r"turn_rewards\['-1'\]: .*; 0 turns fit"),
        ({-1: 1.0}, r"turn_rewards\[-1\]: .*; 0 turns fit"),
        ({"nobody's": 1.0}, r"turn_rewards\[\"nobody's\"\]: .*; 0 turns fit"),
        ({7: None}, r"turn_rewards\[7\]: .*; 0 turns fit"),
        ({2: 1.0}, r"turn_rewards\[2\]: expected a turn that is trained, .* trains turn 2; trained are \[0, 1\]"),
        ({"d": 0.0}, r"turn_rewards\['d'\]: expected a turn that is trained, .* trains turn 3; trained are \[0, 1\]"),
        ({0: math.nan}, r"turn_rewards\[0\]: expected a finite float32, got nan"),
        ({0: math.inf}, r"turn_rewards\[0\]: expected a finite float32, got inf"),
        ({0: True}, r"turn_rewards\[0\]: expected a finite float32, got True"),
        ({0: "1"}, r"turn_rewards\[0\]: expected a finite float32, got '1'"),
        ({0: 1e300}, r"turn_rewards\[0\]: expected a finite float32, got 1e\+300"),
        ({0: 3e38, 1: 3e38}, r"turn 0: expected a finite float32, got 6e\+38"),
    ],
)
def test_what_cannot_be_kept_is_named(rewards: Mapping[int | str, Any], message: str):
    """A turn that is not there, is masked, or is in no sample; a reward that is no finite number."""
    with pytest.raises(ScenarioError, match=message):
        reward_turns([branch([0, 1, 2], masked=[2])], RECORD, rewards)


def test_a_call_id_of_several_turns_is_refused():
    """Only a client that chose it itself could make it so."""
    with pytest.raises(ScenarioError, match=r"turn_rewards\['same'\]: .*; 2 turns fit"):
        reward_turns([branch([0, 1])], session(["same"], ["same"]), {"same": 1.0})


@given(st.lists(st.none() | st.floats(-100, 100), min_size=4, max_size=4), st.floats(-100, 100))
def test_what_turns_have_earned_is_the_reward_of_the_rollout(given_rewards: list[float | None], total: float):
    """Whatever is given to which of them; the first return is all of it."""
    rewards = dict(enumerate(given_rewards))
    samples = reward_turns([branch([0, 1]), branch([0, 2, 3], masked=[0])], RECORD, rewards, total)
    earned = earned_rewards(samples, total)
    assert math.fsum(earned.values()) == pytest.approx(total, abs=1e-9)
    assert samples[0].returns[0] == pytest.approx(total, abs=1e-4)


def test_older_files_have_none_and_a_cut_sample_keeps_them_as_far_as_it_goes():
    [stamped] = reward_turns([branch([0, 1])], RECORD, {0: 0.1, 1: -0.3})
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(sample_to_binary(stamped)))
    text = json.loads(json.dumps(sample_to_json(stamped)))

    for form, read_form in ((text, sample_from_json), (wire, sample_from_binary)):
        older = read_form({name: value for name, value in form.items() if name not in ("turn_rewards", "returns")})
        assert (older.turn_rewards, older.returns.tolist()) == ((), [])
    cut = cut_sample(stamped, CONTEXT + 2)
    assert cut is not None
    assert cut.returns.tolist() == stamped.returns[:2].tolist()


def test_values_of_turns_lie_on_their_tokens():
    """Context and turns without a value have 0."""
    assert spread_over_tokens(branch([4, 6]), {6: 2.5}).tolist() == [0.0] * 5 + [2.5] * 3
