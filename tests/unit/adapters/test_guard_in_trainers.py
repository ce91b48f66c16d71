"""The repeat guard's signal in the types of the trainers, sequence by sequence."""

from typing import Any

import pytest

from harness.adapters.areal.trajectory import trajectory_columns
from harness.adapters.miles.samples import samples_of
from harness.adapters.verl.output import Room, output_fields
from harness.samples.rollout import Outcome, OutcomeKind, Rollout
from harness.sessions.record import RecordIds, session_record
from harness.types import FinishReason
from tests.builders import assistant, new_session, take_turn, user

pytestmark = pytest.mark.usefixtures("trainers")


def rollout_with_a_repetition() -> Rollout:
    """Two branches of one question; the guard has ended the second one."""
    session = new_session()
    first = [user("go")]
    take_turn(session, first, "one")
    take_turn(session, [*first, assistant("one"), user("and?")], "well")
    take_turn(session, [*first, assistant("one"), user("or?")], "aaaa", reason=FinishReason.REPEAT)
    outcome = Outcome(OutcomeKind.FINISHED, None)
    return Rollout("s", outcome, tuple(session.samples()), session_record(session, RecordIds.NONE), None, 1.0)


def test_it_reaches_miles() -> None:
    """And slime, whose samples are made by the same function: `metadata["harness"]`."""
    from miles.utils.types import Sample

    made: list[Any] = samples_of(Sample(index=7), rollout_with_a_repetition(), str, trusts_agent=False)

    assert [each.metadata["harness"]["repeat_terminated"] for each in made] == [0, 1]


def test_it_reaches_verl_and_areal() -> None:
    """verl: `extra_fields["harness"]`; AReaL: a column without a dimension, as the reward."""
    rollout = rollout_with_a_repetition()
    outputs = [output_fields(rollout, each, Room(100, 100), 0, 1) for each in rollout.samples]
    columns = [trajectory_columns(each, 1.0, 0) for each in rollout.samples]

    assert [each["extra_fields"]["harness"]["repeat_terminated"] for each in outputs] == [0, 1]
    assert [(each["repeat_terminated"].shape, int(each["repeat_terminated"])) for each in columns] == [((), 0), ((), 1)]
