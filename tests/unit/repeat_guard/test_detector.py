"""The detector's rules at their edges, one example each; the sweep against the naive definition is in its own file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_patch.repeat_terminate import ConfigError, RepeatDetector, RepeatTerminateConfig, Rule

OFF = {"min_new_tokens": 0, "max_consecutive_token_repeats": 0, "ngram_size": 0}


def _detector(key_ids: tuple[int, ...] | None = None, **mapping: int) -> RepeatDetector:
    return RepeatDetector(RepeatTerminateConfig.from_mapping({**OFF, **mapping}), key_ids)


@pytest.mark.parametrize(
    ("tokens", "index"),
    [([7, 7, 7, 7], 2), ([7, 7, 1, 7, 7], None), ([1, 7, 7, 7], 3), ([], None)],
)
def test_a_run_triggers_at_its_nth_token(tokens: list[int], index: int | None) -> None:
    assert _detector(max_consecutive_token_repeats=3).push_all(tokens) == index


@pytest.mark.parametrize(
    ("tokens", "index"),
    [
        ([1, 2, 3, 1, 2, 3], 5),
        ([9, 1, 2, 3, 1, 2, 3], 6),
        ([1, 2, 3, 1, 2, 4, 1, 2, 3], None),
        ([5, 5, 5, 5, 5, 5], 5),
        ([1, 2, 1, 2, 1, 2, 1, 2], None),
    ],
    ids=[
        "exact",
        "after a prefix",
        "near miss",
        "a shorter period that divides it",
        "a period that does not divide it",
    ],
)
def test_an_ngram_triggers_when_it_came_twice_back_to_back(tokens: list[int], index: int | None) -> None:
    assert _detector(ngram_size=3, ngram_repeats=2).push_all(tokens) == index


def test_an_ngram_can_be_asked_to_come_more_often() -> None:
    assert _detector(ngram_size=2, ngram_repeats=3).push_all([1, 2] * 4) == 5


@pytest.mark.parametrize("repeats", [0, 1])
def test_fewer_than_two_repeats_turn_the_ngram_rule_off(repeats: int) -> None:
    assert _detector(ngram_size=2, ngram_repeats=repeats).push_all([1, 2] * 20) is None


def test_object_keys_count_overlapping_occurrences() -> None:
    """1 2 1 2 1 holds the key 1 2 1 twice."""
    detector = _detector(key_ids=(1, 2, 1), max_object_keys=2)

    assert detector.push_all([1, 2, 1, 2, 1]) == 4
    assert (detector.rule, detector.keys) == (Rule.OBJECT_KEYS, 2)


def test_object_keys_need_their_tokens() -> None:
    with pytest.raises(ConfigError, match="max_object_keys: expected the token ids"):
        _detector(max_object_keys=2)


def test_nothing_triggers_before_the_minimum_and_what_holds_then_does() -> None:
    detector = _detector(max_consecutive_token_repeats=3, min_new_tokens=6)

    assert detector.push_all([7] * 10) == 5


def test_a_run_that_ended_before_the_minimum_is_forgotten() -> None:
    assert _detector(max_consecutive_token_repeats=3, min_new_tokens=6).push_all([7, 7, 7, 7, 1, 2, 3, 4]) is None


def test_rules_are_looked_at_in_their_order() -> None:
    detector = _detector(key_ids=(7,), max_object_keys=4, max_consecutive_token_repeats=4, ngram_size=2)
    detector.push_all([7, 7, 7, 7])
    assert detector.rule is Rule.OBJECT_KEYS

    detector = _detector(max_consecutive_token_repeats=4, ngram_size=2)
    detector.push_all([7, 7, 7, 7])
    assert detector.rule is Rule.CONSECUTIVE


def test_what_was_generated_before_a_joint_counts() -> None:
    """A detector seeded with the head of an output triggers at the same token as one that saw all of it."""
    output = [5, 6, 1, 2, 3, 1, 2, 3]
    for joint in range(len(output)):
        detector = _detector(ngram_size=3, min_new_tokens=8)
        detector.seed(output[:joint])

        assert detector.push_all(output[joint:]) == len(output) - 1 - joint
        assert detector.length == len(output)


def test_a_trigger_is_for_good() -> None:
    detector = _detector(max_consecutive_token_repeats=2)

    assert [detector.push(token) for token in (1, 1, 2, 3)] == [False, True, True, True]
    assert (detector.length, detector.rule) == (2, Rule.CONSECUTIVE)


@given(
    tokens=st.lists(st.sampled_from([1, 1, 1, 2, 3]), max_size=60).map(lambda few: [4, 5] * 130 + few + [1, 2, 1] * 5),
    config=st.fixed_dictionaries(
        {
            "min_new_tokens": st.sampled_from([0, 265, 280, 400]),
            "max_consecutive_token_repeats": st.sampled_from([0, 3, 5]),
            "ngram_size": st.sampled_from([0, 1, 3, 7]),
            "ngram_repeats": st.sampled_from([0, 2, 3]),
            "max_object_keys": st.sampled_from([3, 1000]),
        }
    ),
    later=st.lists(st.sampled_from([1, 2, 3]), max_size=20),
)
def test_many_tokens_at_once_count_as_one_by_one(tokens: list[int], config: dict[str, int], later: list[int]) -> None:
    """The same token triggers the same rule, and what comes later finds the same state."""
    at_once, one_by_one = (_detector(key_ids=(1, 2, 1), **config) for _ in range(2))

    at = at_once.push_all(tokens)
    expected = next((index for index, token in enumerate(tokens) if one_by_one.push(token)), None)

    assert at == expected
    assert [at_once.push(token) for token in later] == [one_by_one.push(token) for token in later]
    assert (at_once.rule, at_once.length, at_once.keys) == (one_by_one.rule, one_by_one.length, one_by_one.keys)
