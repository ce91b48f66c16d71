"""Who holds the tokens of a session that was kept, by how the rollout ended that was to go on from it."""

from dataclasses import replace

import pytest

from harness.samples.rollout import Outcome, OutcomeKind
from harness.training.collector.fates import RolloutFate
from harness.training.collector.rollout_index import ScoredRollout
from harness.training.collector.step_budget import StepBudget
from harness.training.collector.step_outcome import CarriedGroup
from harness.training.collector.step_places import EndedRollout, StepPlaces
from harness.training.collector.step_plan import RolloutAttempt
from harness.training.collector.step_rules import StepRules
from tests.unit.collector.packed_steps import index_of, scored_rollout

INDEX = index_of(0, 1)
ATTEMPT = RolloutAttempt(0, 0, 0)


def end_of(kind: OutcomeKind, session_id: str | None) -> ScoredRollout:
    """A rollout that was to go on from the session "kept", and failed."""
    scored = scored_rollout(INDEX)
    record = scored.rollout.session if session_id else {}
    rollout = replace(scored.rollout, session_id=session_id, outcome=Outcome(kind, None), session=record)
    return replace(scored, rollout=rollout, reward=None)


@pytest.mark.parametrize(
    ("ended", "recorded", "given_back"),
    [
        (end_of(OutcomeKind.CRASHED, "its own"), "its own", []),
        (end_of(OutcomeKind.NOT_STARTED, None), "kept", ["kept"]),
        (end_of(OutcomeKind.DRAINED, None), None, ["kept"]),
        (end_of(OutcomeKind.HARNESS_FAILED, None), None, ["kept"]),
        (None, None, ["kept"]),
    ],
    ids=["own session", "refused", "drained", "no answer", "cancelled"],
)
def test_the_session_that_a_rollout_is_recorded_with(
    ended: ScoredRollout | None, recorded: str | None, given_back: list[str]
):
    """Its own, the kept one where the server has certainly not taken that over, and none where nobody can tell."""
    kept = replace(scored_rollout(INDEX, "kept"), has_kept_session=True)
    places = StepPlaces(1, StepRules(StepBudget(1)), [CarriedGroup(INDEX.group, cut_short={0: kept})])
    assert places.begin(ATTEMPT).resumes == "kept"
    places.settle(ATTEMPT, EndedRollout(INDEX, ended, RolloutFate.REPLACED, "it failed"))
    places.close(keeps=False)
    [settled] = places.settled()
    assert (settled.session_id, places.unclaimed) == (recorded, given_back)
    assert bool(settled.ledger["generated"]) is (recorded is not None)


def test_a_kept_session_that_nobody_has_begun_with_is_recorded_as_it_is():
    """In the step that does not leave it to a next one."""
    kept = replace(scored_rollout(INDEX, "kept"), has_kept_session=True)
    places = StepPlaces(1, StepRules(StepBudget(1)), [CarriedGroup(INDEX.group, cut_short={0: kept})])
    places.close(keeps=False)
    [settled] = places.settled()
    assert (settled.session_id, places.unclaimed) == ("kept", ["kept"])
