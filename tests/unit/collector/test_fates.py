"""What becomes of a rollout: the table in force is the documented one, and no kind of outcome is missing."""

import re

import pytest

from harness.samples.rollout import OutcomeKind
from harness.training.collector.fates import FATES, OnFailure, RolloutFate, fate_of
from harness.training.collector.groups import drop_zero_variance
from tests.checkout import ROOT


def test_the_table_in_the_docs_is_the_one_in_force():
    """docs/training.md, row by row."""
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    documented = re.findall(
        r"^\| `(\w+)` \| `?(\w+)`? \|$", page.partition("## What becomes of a rollout")[2], re.MULTILINE
    )
    assert documented == [(str(kind), str(fate or "on_failure")) for kind, fate in FATES.items()]
    assert set(FATES) == set(OutcomeKind)


@pytest.mark.parametrize("kind", OutcomeKind)
def test_only_the_agents_own_failures_are_a_choice(kind: OutcomeKind):
    """And a rollout without a finite reward is never kept, nor counted where it would have been kept."""
    replaced, counted = (fate_of(kind, choice) for choice in (OnFailure.REPLACE, OnFailure.COUNT))
    if FATES[kind] is None:
        assert (replaced, counted) == (RolloutFate.REPLACED, RolloutFate.COUNTED)
    else:
        assert replaced is counted is FATES[kind]
    assert fate_of(kind, OnFailure.REPLACE, is_usable=False) is RolloutFate.REPLACED


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [([0.5, 0.5], "zero_variance"), ([], "zero_variance"), ([1.0], "zero_variance"), ([0.0, 1.0], None)],
)
def test_a_group_without_variance_teaches_nothing(rewards: list[float], reason: str | None):
    """Nor does one whose rollouts were all counted."""
    assert drop_zero_variance(rewards) == reason
