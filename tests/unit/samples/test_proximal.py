"""What a scoring does to the tokens of a branch (I7)."""

import numpy as np
import pytest
from msgspec import structs

from harness.errors import UnknownWeightVersion
from harness.samples.delivery import plan_delivery
from harness.samples.merge import build_samples
from harness.samples.proximal import (
    NextVersions,
    ProximalColumns,
    Staleness,
    count_next_versions,
    keep_scores,
    oldest_version,
    sample_scoring_start,
    score_sample,
    score_turns,
    scoring_start,
    staleness,
    staleness_telemetry,
    waiting_tokens,
    waiting_window,
)
from harness.types import PromptLogprobs, as_ids, as_logprobs
from tests.unit.samples.toy_policy import Rollout, ToyEngine, proximal_of, toy_policy, true_proximal, turn


def test_what_is_asked_for_begins_at_the_first_waiting_token():
    """Not at 0, not at the last segment; a token that already has its value, or never will, is not asked for."""
    spans = [("0", 0, 1), ("1", 1, 3), ("2", 3, 4)]
    first = turn(output=[1, 2, 3, 4], logprobs=[-1.0] * 4, spans=spans)
    second = turn(1, parent=first, output=[5, 6], logprobs=[-1.0] * 2, spans=[("1", 0, 2)])

    assert {version: scoring_start([first, second], version) for version in range(5)} == {
        0: None,
        1: first.prompt_length,
        2: first.prompt_length + 1,
        3: first.prompt_length + 3,
        4: None,
    }
    assert [waiting_tokens([first, second], version) for version in range(5)] == [0, 1, 4, 1, 0]
    assert waiting_window([first, second], 2) == range(first.prompt_length + 1, second.prompt_length + 2)


@pytest.mark.parametrize("start", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("size", [0, 1, 2, 8])
def test_a_scoring_that_covers_a_part_settles_that_part(start, size):
    whole = turn(output=[1, 2, 3], logprobs=[-1.0, -2.0, -3.0], spans=[("0", 0, 3)])
    values = toy_policy(as_ids(range(size)), start, 1)

    [after] = score_turns([whole], PromptLogprobs(start, values, "1")) or [whole]

    covered = [start <= position < start + size for position in range(2, 5)]
    expected = [float(values[2 + i - start]) if covered[i] else whole.logprobs[i] for i in range(3)]
    assert proximal_of([after]) == list(zip(expected, [int(each) for each in covered], strict=True))
    assert waiting_tokens([after], 1) == covered.count(False)


def test_tokens_that_a_guard_forced_are_never_scored():
    """Nobody sampled them; the sampled ones before them are."""
    ended = turn(output=[1, 2, 3], logprobs=[-1.0, -2.0, 0.0], spans=[("0", 0, 3)], forced_tokens=1)

    [after] = score_turns([ended], PromptLogprobs(1, as_logprobs([-9.0] * 4), "1"))

    assert proximal_of([after]) == [(-9.0, 1), (-9.0, 1), (0.0, 0)]
    assert waiting_tokens([ended], 1) == 2


def test_a_partial_output_is_scored_before_it_is_a_turn():
    """What a continuation holds between two segments: extended by the new tokens, settled by the resume's scoring."""
    spans = turn(output=[1], logprobs=[-2.5], spans=[("0", 0, 1)]).version_spans
    more = turn(output=[1, 2], logprobs=[-1.8, -2.1], spans=[("1", 0, 2)]).version_spans

    columns = ProximalColumns.of_output(2, as_logprobs([-2.5]), spans)
    columns = columns.settle(PromptLogprobs(2, as_logprobs([-2.3]), "1")).extend(as_logprobs([-1.8, -2.1]), more)

    assert columns.behavior_versions.tolist() == [0, 1, 1]
    assert columns.logprobs.tolist() == pytest.approx([-2.3, -1.8, -2.1])
    assert columns.versions.tolist() == [1, 1, 1]
    assert (columns.waiting_window(1), columns.waiting_window(2)) == (None, range(3, 5))


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_a_turn_that_goes_on_keeps_the_scores_of_its_broken_off_part(kept):
    """A retry makes another outcome of the same turn; what the first part met is not forgotten."""
    broken_off = turn(output=[1, 2], logprobs=[-1.0, -2.0], spans=[("0", 0, 2)])
    [scored] = score_turns([broken_off], PromptLogprobs(2, as_logprobs([-5.0, -6.0]), "1"))
    spans = [("0", 0, min(2, kept)), ("1", min(2, kept), kept)]
    whole = turn(output=[1, 2, 3, 4][:kept], logprobs=[-1.0, -2.0, -3.0, -4.0][:kept], spans=spans)

    went_on = keep_scores(whole, scored)

    expected = [(-5.0, 1), (-6.0, 1), (-3.0, 1), (-4.0, 1)][:kept]
    assert proximal_of([went_on]) == expected
    assert keep_scores(whole, broken_off) is whole


def test_a_turn_without_values_of_its_own_holds_the_behavior_values():
    """A turn that no scoring changed says so with None, not with copies."""
    plain = turn(output=[1, 2], logprobs=[-1.0, -2.0], spans=[("4", 0, 2)])

    assert score_turns([plain], PromptLogprobs(1, as_logprobs([-9.0] * 3), "4")) == []
    assert score_turns([plain], PromptLogprobs(1, as_logprobs([-9.0] * 3), "6")) == []
    assert plain.proximal_logprobs is None


def test_a_label_that_is_no_version_scores_nothing():
    """An engine that lost count is an error, not a guess."""
    with pytest.raises(UnknownWeightVersion, match="step-7"):
        score_turns(
            [turn(output=[1], logprobs=[-1.0], spans=[("0", 0, 1)])], PromptLogprobs(1, as_logprobs([]), "step-7")
        )


def test_a_sample_that_has_left_its_session_can_still_be_scored():
    """Rollouts that wait for a trainer meet their next version too."""
    rollout = Rollout(ToyEngine())
    for _ in range(2):
        rollout.next_turn(4, 5, 6)
        rollout.sample(3)
    [sample] = build_samples(plan_delivery(rollout.turns), {"task": 1})
    rollout.engine.update(1)

    start = sample_scoring_start(sample, 1)
    scored = score_sample(sample, rollout.engine.score(sample.tokens, start))

    assert start == rollout.turns[0].prompt_length
    assert scored.proximal_versions.tolist() == [1, 1, 1, -1, -1, -1, 1, 1, 1]
    values = scored.proximal_logprobs[scored.behavior_versions >= 0].tolist()
    assert values == [value for value, _ in true_proximal(rollout.turns, {1})]
    assert scored.metadata["staleness"]["proximal_share"] == 1.0
    assert (scored.metadata["staleness"]["newest_version"], scored.metadata["staleness"]["lag_min"]) == (1, 1)
    assert (scored.metadata["task"], sample.metadata["staleness"]["proximal_share"]) == (1, 0.0)


def test_the_staleness_of_a_sample_is_counted_over_its_sampled_tokens():
    """Environment tokens have no version; the share counts what truly met its next one."""
    behavior, proximal = as_ids([0, 0, -1, 1, 3]), as_ids([1, 0, -1, 2, 3])

    assert staleness(behavior, proximal, live=5) == Staleness(5, 2, lag_mean=4.0, lag_max=5, proximal_share=0.5)
    assert staleness(as_ids([-1]), as_ids([-1]), live=5) is None


@pytest.mark.parametrize("live", [None, 2, 3])
def test_lags_count_from_the_newest_token_where_no_newer_version_is_known(live):
    """Nobody knows the live version, or an engine restarts its count: no lag is below 0."""
    behavior, proximal = as_ids([0, 0, -1, 1, 3]), as_ids([1, 0, -1, 2, 3])

    assert staleness(behavior, proximal, live) == Staleness(3, 0, lag_mean=2.0, lag_max=3, proximal_share=0.5)


def test_the_telemetry_of_many_samples_counts_each_by_its_tokens():
    """A sample without a sampled token says nothing; without any sample there is nothing to lag."""
    old = as_ids([0, 0, -1, 1]), as_ids([1, 0, -1, 2]), 4
    fresh = as_ids([5]), as_ids([5]), 7

    assert staleness_telemetry([old, fresh, (as_ids([-1]), as_ids([-1]), 9)]) == {
        "rollout/version_lag_min": 2,
        "rollout/version_lag_mean": pytest.approx((4 + 4 + 3 + 2) / 4),
        "rollout/version_lag_max": 4,
        "rollout/proximal_share": pytest.approx(2 / 4),
    }
    assert set(staleness_telemetry([]).values()) == {0}


def test_a_token_could_meet_its_next_version_when_that_was_live():
    """Whoever says so: a later token, a scoring, or the version under which some sample was read."""
    old, fresh, scored = (
        (as_ids([0, 0, -1, 1]), as_ids([1, 0, -1, 1]), None),
        (as_ids([1]), as_ids([1]), 2),
        (as_ids([2]), as_ids([3]), None),
    )

    assert count_next_versions([old]) == NextVersions(2, 1)
    assert count_next_versions([old, fresh]) == NextVersions(4, 1)
    assert count_next_versions([fresh, old, scored]) == NextVersions(5, 2)
    assert (count_next_versions([]).share, NextVersions(4, 1).share) == (0.0, 0.25)


def test_the_oldest_version_of_a_branch_is_read_from_its_spans():
    """What an admission cap on staleness needs, without a look at any token."""
    first = turn(output=[1], logprobs=[-1.0], spans=[("3", 0, 1)])
    second = turn(1, parent=first, output=[1, 2], logprobs=[-1.0, -1.0], spans=[("2", 0, 1), ("4", 1, 2)])

    assert oldest_version([*first.version_spans, *second.version_spans]) == 2
    assert oldest_version([]) is None


def test_a_turn_with_no_token_of_the_version_before_is_not_expanded():
    """The look for waiting tokens costs the spans of a turn, not its length (I11)."""
    long = turn(output=range(10_000), logprobs=np.full(10_000, -1.0), spans=[("5", 0, 10_000)])
    unreadable = structs.replace(long, logprobs=None)

    assert scoring_start([unreadable], 5) is None
    assert scoring_start([long], 6) == 2
