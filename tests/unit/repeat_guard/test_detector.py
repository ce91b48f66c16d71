"""What the sweep of sequences does not show of the detector."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_patch.repeat_terminate import ConfigError, RepeatDetector, RepeatTerminateConfig, Rule

OFF = {"min_new_tokens": 0, "max_consecutive_token_repeats": 0, "ngram_size": 0}


def _detector(key_ids: tuple[int, ...] | None = None, **mapping: int) -> RepeatDetector:
    return RepeatDetector(RepeatTerminateConfig.from_mapping({**OFF, **mapping}), key_ids)


@pytest.mark.parametrize("repeats", [0, 1])
def test_fewer_than_two_repeats_turn_the_ngram_rule_off(repeats: int) -> None:
    assert _detector(ngram_size=2, ngram_repeats=repeats).push_all([1, 2] * 20) is None


def test_object_keys_need_their_tokens() -> None:
    with pytest.raises(ConfigError, match="max_object_keys: expected the token ids"):
        _detector(max_object_keys=2)


def test_rules_are_looked_at_in_their_order() -> None:
    detector = _detector(key_ids=(7,), max_object_keys=4, max_consecutive_token_repeats=4, ngram_size=2)
    detector.push_all([7, 7, 7, 7])
    assert detector.rule is Rule.OBJECT_KEYS

    detector = _detector(max_consecutive_token_repeats=4, ngram_size=2)
    detector.push_all([7, 7, 7, 7])
    assert detector.rule is Rule.CONSECUTIVE


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
