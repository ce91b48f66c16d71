"""Failed rollouts by cause: the words are those of the report."""

import pytest

from harness.errors import Cause, RunError
from harness.samples.rollout import OutcomeKind
from harness.suite.record.rollout_table import RecordedSession, RolloutRecord
from harness.suite.run.failed import FailedOnly


def _record(number: int, outcome: OutcomeKind, cause: Cause | None, *, met_fault: bool = False) -> RolloutRecord:
    return RolloutRecord(
        number=number,
        group=0,
        scenario="s",
        seed=1,
        session_id=None,
        outcome=outcome,
        cause=cause,
        detail="",
        agent_result=None,
        reward=None,
        score={},
        score_error=None,
        session=RecordedSession(),
        samples=[],
        seconds=1.0,
        met_fault=met_fault,
    )


RECORDS = {
    each.number: each
    for each in (
        _record(0, OutcomeKind.FINISHED, None),
        _record(1, OutcomeKind.LIMITED, Cause.LIMIT),
        _record(2, OutcomeKind.DRAINED, Cause.LIMIT),
        _record(3, OutcomeKind.CRASHED, Cause.AGENT),
        _record(4, OutcomeKind.TIMED_OUT, Cause.LIMIT),
        _record(5, OutcomeKind.ENGINE_FAILED, Cause.ENGINE),
        _record(6, OutcomeKind.CRASHED, Cause.AGENT, met_fault=True),
    )
}


@pytest.mark.parametrize(
    ("only", "numbers"),
    [
        ("failed", {3, 4, 5}),
        ("failed:crashed", {3}),
        ("failed:timed_out, engine", {4, 5}),
        ("failed:limit", {4}),
        ("failed:garbage", set()),
    ],
)
def test_rollouts_are_chosen_by_outcome_or_by_whom_to_blame(only: str, numbers: set[int]):
    """A limit, an abort and a fault of the scenario are no failures."""
    assert FailedOnly.parse(only).choose(RECORDS) == numbers


@pytest.mark.parametrize("only", ["", "passed", "failed:", "failed:crashed,", "failed,crashed"])
def test_anything_else_is_refused(only: str):
    with pytest.raises(RunError, match="expected failed or failed:CAUSE"):
        FailedOnly.parse(only)


@pytest.mark.parametrize("only", ["failed:finished", "failed:drained", "failed:agent_crashed"])
def test_an_unknown_cause_is_refused_with_those_there_are(only: str):
    with pytest.raises(RunError, match=r"those of this run: .*crashed \(1\)"):
        FailedOnly.parse(only).choose(RECORDS)
