"""Rules of a step: budgets add up over ranks, and what becomes of a rollout is the documented table."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import StepError
from harness.samples.rollout import OutcomeKind
from harness.training.collector.groups import drop_zero_variance
from harness.training.collector.step_outcome import Disposition
from harness.training.collector.step_rules import DISPOSITIONS, OnFailure, Partial, StepBudget, StepRules, dispose
from tests.checkout import ROOT


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 12))
def test_every_group_is_one_ranks(groups: int, group_size: int, world_size: int):
    """In order, without gap or overlap; the shares differ by one at most, and some may be empty."""
    budget = StepBudget(groups * group_size, group_size)
    slices = [budget.slice_of(rank, world_size) for rank in range(world_size)]
    assert [group for each in slices for group in each] == list(range(budget.groups))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


@given(st.integers(1, 500), st.integers(1, 16), st.integers(1, 16))
def test_a_covering_budget_is_the_least_whole_number_of_batches(rollouts: int, per_device_batch: int, world_size: int):
    """At least what was asked for, and less than one global batch more."""
    covered = StepBudget.cover(rollouts, per_device_batch, world_size).rollouts_per_step
    assert covered % (per_device_batch * world_size) == 0
    assert rollouts <= covered < rollouts + per_device_batch * world_size


def test_a_budget_is_derived_from_what_a_trainer_counts_in():
    """Per-device batch, ranks, and packs between two updates."""
    assert StepBudget.derive(2, 4, 8, group_size=16) == StepBudget(64, 16)


def test_what_is_no_budget_is_refused():
    """Field and value are in the message."""
    with pytest.raises(StepError, match="rollouts_per_step is 30, which is no multiple of group_size, 8"):
        StepBudget(30, 8)
    for rollouts, group_size in ((0, 1), (8, 0), (-8, 8)):
        with pytest.raises(StepError, match="at least 1"):
            StepBudget(rollouts, group_size)
    with pytest.raises(StepError, match="at least 1"):
        StepBudget.cover(8, 0, 4)
    for rank in (-1, 2):
        with pytest.raises(StepError, match="rank from 0 to 1"):
            StepBudget(8).slice_of(rank, 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"concurrency": 0}, "concurrency: expected at least 1, got 0"),
        ({"over_sampling": -1}, "over_sampling: expected at least 0, got -1"),
        ({"attempts": 0}, "attempts: expected at least 1, got 0"),
        ({"deadline_s": 0.0}, "deadline_s: expected a positive number of seconds, got 0.0"),
        ({"rank": 2, "world_size": 2}, "expected a rank from 0 to 1, got 2"),
        ({"partial": Partial.RESUME}, "over_sampling is 0; set that too"),
    ],
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str):
    """By name, when they are made."""
    with pytest.raises(StepError, match=message):
        StepRules(StepBudget(4), **wrong)


def test_the_list_in_the_docs_is_the_one_in_force():
    """docs/training.md, line by line."""
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8").partition("A rollout by its outcome:\n\n")[2]
    lines = [line.removeprefix("- ").partition(": ") for line in page.partition("\n\n")[0].splitlines()]
    documented = {kind: use.strip("`") for use, _, kinds in lines for kind in re.findall(r"`(\w+)`", kinds)}
    assert documented == {str(kind): str(use or "on_failure") for kind, use in DISPOSITIONS.items()}
    assert set(DISPOSITIONS) == set(OutcomeKind)


@pytest.mark.parametrize("kind", OutcomeKind)
def test_only_the_agents_own_failures_are_a_choice(kind: OutcomeKind):
    """And a rollout without a finite reward is never delivered, nor counted where it would have been delivered."""
    replaced, counted = (dispose(kind, choice) for choice in (OnFailure.REPLACE, OnFailure.COUNT))
    if DISPOSITIONS[kind] is None:
        assert (replaced, counted) == (Disposition.REPLACED, Disposition.COUNTED)
    else:
        assert replaced is counted is DISPOSITIONS[kind]
    assert dispose(kind, OnFailure.REPLACE, is_usable=False) is Disposition.REPLACED


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [([0.5, 0.5], "zero_variance"), ([], "zero_variance"), ([1.0], "zero_variance"), ([0.0, 1.0], None)],
)
def test_a_group_without_variance_teaches_nothing(rewards: list[float], reason: str | None):
    """Nor does one whose rollouts were all counted."""
    assert drop_zero_variance(rewards) == reason
