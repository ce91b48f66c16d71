"""The known ways to get proximal logprobs wrong, each run beside the right way on data that tells them apart.

Every test names a mistake (most of them are in published code), shows that it gives a value the definition does not
give, and that ours gives the definition's values everywhere.
"""

from dataclasses import replace

import numpy as np
import pytest

from harness.engines.base import LogprobScale
from harness.samples.versions import expand_spans
from harness.types import PromptLogprobs, Turn, VersionSpan, as_ids, as_logprobs
from tests.unit.samples.toy_policy import Collector, Rollout, ToyEngine, proximal_of, true_proximal


def interrupted_twice(collector: Collector | None = None, engine: ToyEngine | None = None) -> Rollout:
    """Two finished turns, then one in three segments: versions 0 0 0 | 0 0 | 0 0, 1 1, 2; v1 and v2 met by resumes."""
    rollout = Rollout(engine or ToyEngine(), collector)
    for tokens in (3, 2):
        rollout.next_turn(4, 5, 6)
        rollout.sample(tokens)
    rollout.next_turn(9)
    rollout.sample(2)
    rollout.engine.update(1)
    rollout.sample(2)
    rollout.engine.update(2)
    rollout.sample(1)
    return rollout


def wrong_tokens(rollout: Rollout, met: set[int]) -> int:
    """How many tokens do not have the definition's values."""
    found, true = proximal_of(rollout.turns), true_proximal(rollout.turns, met)
    return sum(
        version != true_version or abs(value - true_value) > 1e-6
        for (value, version), (true_value, true_version) in zip(found, true, strict=True)
    )


def columns_of(turn: Turn) -> tuple[np.ndarray, np.ndarray]:
    """Writable proximal columns of a turn."""
    versions = expand_spans(turn.version_spans, turn.output_ids.size)
    logprobs = turn.logprobs if turn.proximal_logprobs is None else turn.proximal_logprobs
    return logprobs.copy(), (versions if turn.proximal_versions is None else turn.proximal_versions).copy()


def with_columns(turn: Turn, logprobs: np.ndarray, versions: np.ndarray) -> Turn:
    """`turn` with other proximal columns."""
    return replace(turn, proximal_logprobs=as_logprobs(logprobs), proximal_versions=as_ids(versions))


def overwritten(turn: Turn, scoring: PromptLogprobs, *, jump: bool = False) -> Turn:
    """`turn` with every token in the window of `scoring` replaced; with `jump` those of older versions."""
    logprobs, versions = columns_of(turn)
    behavior = expand_spans(turn.version_spans, turn.output_ids.size)
    for i in range(logprobs.size):
        at = turn.prompt_length + i - scoring.start
        if 0 <= at < scoring.logprobs.size and (not jump or behavior[i] < int(scoring.version)):
            logprobs[i], versions[i] = scoring.logprobs[at], int(scoring.version)
    return with_columns(turn, logprobs, versions)


class ReplacesAllEarlierTokens(Collector):
    """Each resume scores from the first prompt on and replaces whatever it sees."""

    def start(self, turns, engine):
        return turns[0].prompt_length if turns[0].output_ids.size else None

    def apply(self, turns, scoring, engine):
        return [overwritten(turn, scoring) for turn in turns]


class AcceptsOlderVersions(Collector):
    """Scores whatever is older than the live version instead of exactly one version older."""

    def start(self, turns, engine):
        return turns[0].prompt_length if turns[0].output_ids.size else None

    def apply(self, turns, scoring, engine):
        return [overwritten(turn, scoring, jump=True) for turn in turns]


class StartsAtTheLastSegment(Collector):
    """Asks from the start of the last segment, then maps the values from the first output token on."""

    def start(self, turns, engine):
        last = turns[-1]
        return last.prompt_length + last.version_spans[-1].start if last.version_spans else None

    def apply(self, turns, scoring, engine):
        moved = replace(scoring, start=turns[-1].prompt_length)
        return [*turns[:-1], *super().apply(turns[-1:], moved, engine)]


class ShiftedWindow(Collector):
    """Reads the list of values from a wrong entry: the null entry counted or not, or sliced twice."""

    def __init__(self, by: int) -> None:
        self.by = by

    def apply(self, turns, scoring, engine):
        return super().apply(turns, replace(scoring, start=scoring.start + self.by), engine)


class LastTurnOnly(Collector):
    """Looks at the turn that is being resumed; the turns before it are never scored."""

    def start(self, turns, engine):
        return super().start(turns[-1:], engine)


class ClockOfTheClient(Collector):
    """Labels a reply with the version that the client sees when it reads it."""

    def apply(self, turns, scoring, engine):
        return super().apply(turns, replace(scoring, version=str(engine.version)), engine)

    def behavior(self, result, engine):
        return (VersionSpan(str(engine.version), 0, result.output_ids.size),) if result.output_ids.size else ()


class IgnoresTheScale(Collector):
    """Takes raw prompt logprobs whatever scale the sampled ones are on."""

    def comparable(self, turns, engine):
        return list(turns)


def test_ours_gives_the_definition_on_the_data_of_these_tests():
    """Every token of a turn interrupted twice, and of the turns before it, meets its next version."""
    assert wrong_tokens(interrupted_twice(), {1, 2}) == 0


@pytest.mark.parametrize(
    ("mistake", "wrong"),
    [
        pytest.param(ReplacesAllEarlierTokens(), 7, id="replaces_all_earlier_tokens_on_each_resume"),
        pytest.param(AcceptsOlderVersions(), 7, id="takes_any_older_version"),
        pytest.param(StartsAtTheLastSegment(), 5 + 2, id="wrong_offset_from_the_second_abort_on"),
        pytest.param(ShiftedWindow(1), 9, id="off_by_one"),
        pytest.param(ShiftedWindow(-1), 9, id="off_by_one_the_other_way"),
        pytest.param(ShiftedWindow(2), 9, id="off_by_two"),
        pytest.param(LastTurnOnly(), 5, id="earlier_turns_are_never_scored"),
    ],
)
def test_a_mistake_in_what_is_asked_for_or_where_it_goes(mistake, wrong):
    """The number of tokens it gets wrong, of the nine that meet their next version."""
    assert wrong_tokens(interrupted_twice(mistake), {1, 2}) == wrong
    assert wrong_tokens(interrupted_twice(), {1, 2}) == 0


def test_the_wrong_offset_shows_from_the_second_abort_on_only():
    """With one turn and one abort the last segment is the whole output: the mistake looks right there."""

    def aborts(collector: Collector, count: int) -> Rollout:
        rollout = Rollout(ToyEngine(), collector)
        rollout.next_turn()
        for version in range(count + 1):
            rollout.engine.update(version)
            rollout.sample(2)
        return rollout

    assert wrong_tokens(aborts(StartsAtTheLastSegment(), 1), {1}) == 0
    assert wrong_tokens(aborts(StartsAtTheLastSegment(), 2), {1, 2}) == 2
    assert wrong_tokens(aborts(Collector(), 2), {1, 2}) == 0


def test_a_version_read_from_a_clock_after_the_reply():
    """An update lands between the engine's reply and its reader: only the reply knows who sampled and who scored."""

    def raced(collector: Collector) -> Rollout:
        rollout = Rollout(ToyEngine(), collector)
        rollout.next_turn()
        rollout.sample(2)
        rollout.engine.update(1)
        rollout.update_before_reply = 2
        rollout.sample(2)
        rollout.sample(1)
        return rollout

    right, wrong = raced(Collector()), raced(ClockOfTheClient())

    assert [span.version for span in right.turns[0].version_spans] == ["0", "1", "2"]
    assert wrong_tokens(right, {1, 2}) == 0
    assert [span.version for span in wrong.turns[0].version_spans] == ["0", "2", "2"]
    # Tokens of version 1 pass for version 2 and so never meet it; those of 0 were scored by 1, labeled 2, and refused.
    assert [version for _, version in proximal_of(wrong.turns)] == [0, 0, 2, 2, 2]


def test_a_jump_of_two_versions():
    """Version 1 never served: its logprobs do not exist, and those of version 2 are not in their place."""

    def jumped(collector: Collector) -> Rollout:
        rollout = Rollout(ToyEngine(), collector)
        rollout.next_turn()
        rollout.sample(3)
        rollout.engine.update(2)
        rollout.sample(2)
        return rollout

    assert wrong_tokens(jumped(AcceptsOlderVersions()), {2}) == 3
    assert wrong_tokens(jumped(Collector()), {2}) == 0


def test_temperature_with_raw_prompt_logprobs():
    """At 0.7 an engine that reports after-temperature logprobs cannot score: behavior values stay, not a mixture."""

    def heated(collector: Collector, scale: LogprobScale) -> Rollout:
        return interrupted_twice(collector, ToyEngine(scale=scale, temperature=0.7))

    mixed = heated(IgnoresTheScale(), LogprobScale.AFTER_TEMPERATURE)
    refused = heated(Collector(), LogprobScale.AFTER_TEMPERATURE)
    raw = heated(Collector(), LogprobScale.RAW)

    on_one_scale = [pair[0] / 0.7 if pair[1] else pair[0] for pair in true_proximal(mixed.turns, {1, 2})]
    found = [pair[0] for pair in proximal_of(mixed.turns)]
    assert max(abs(a - b) for a, b in zip(found, on_one_scale, strict=True)) > 0.5
    assert all(turn.proximal_logprobs is None for turn in refused.turns)
    assert wrong_tokens(raw, {1, 2}) == 0


def test_a_resume_whose_prefill_hits_a_stale_kv_cache():
    """Without a flush the prefix keeps the KV of the weights before, and every score on top of it is of neither."""
    assert wrong_tokens(interrupted_twice(engine=ToyEngine(flushes=False)), {1, 2}) == 9
    assert wrong_tokens(interrupted_twice(engine=ToyEngine(flushes=True)), {1, 2}) == 0
