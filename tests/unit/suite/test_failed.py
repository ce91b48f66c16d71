"""Failed rollouts by cause: the words are those of the report."""

import pytest

from harness.errors import Cause, RunError
from harness.samples.rollout import OutcomeKind
from harness.suite.run.open_run import FailedOnly
from tests.recorded_runs import rollout_record

ENDS = (
    (OutcomeKind.FINISHED, None),
    (OutcomeKind.LIMITED, Cause.LIMIT),
    (OutcomeKind.DRAINED, Cause.LIMIT),
    (OutcomeKind.CRASHED, Cause.AGENT),
    (OutcomeKind.TIMED_OUT, Cause.LIMIT),
    (OutcomeKind.ENGINE_FAILED, Cause.ENGINE),
    (OutcomeKind.SANDBOX_FAILED, Cause.HARNESS),
)
RECORDS = {number: rollout_record(outcome=outcome, cause=cause) for number, (outcome, cause) in enumerate(ENDS)}
RECORDS[len(ENDS)] = rollout_record(outcome=OutcomeKind.CRASHED, cause=Cause.AGENT, met_fault=True)


@pytest.mark.parametrize(
    ("only", "numbers"),
    [
        ("failed", {3, 4, 5, 6}),
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
