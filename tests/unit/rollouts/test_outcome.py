"""Every way in which a rollout can end has exactly one outcome."""

from itertools import product

import pytest

from harness.errors import Cause
from harness.rollouts.agents.agent_output import AgentResult
from harness.rollouts.outcome import (
    DRAIN_CODES,
    ENGINE_CODES,
    HARNESS_CODES,
    LIMIT_CODES,
    AgentEnd,
    Ending,
    RolloutFacts,
    classify,
    classify_uncreated,
)
from harness.samples.rollout import OutcomeKind as Kind

WELL = AgentEnd(Ending.EXITED, 0)
BADLY = AgentEnd(Ending.EXITED, 1)
RETURNED = AgentEnd(Ending.RETURNED)
RAISED = AgentEnd(Ending.RAISED, detail="KeyError: 'x'")
SEGFAULT = AgentEnd(Ending.KILLED, 11)
LATE = AgentEnd(Ending.TIMED_OUT)
STOPPED = AgentEnd(Ending.STOPPED)
UNSTARTED = AgentEnd(Ending.NOT_STARTED, detail="no program 'codex'")
UNBOXED = AgentEnd(Ending.BOX_FAILED, detail="no program bwrap on PATH")
UNPREPARED = AgentEnd(Ending.NOT_PREPARED, detail="No space left on device")
GARBAGE = AgentResult(garbage="not JSON")


@pytest.mark.parametrize(
    ("facts", "kind", "cause"),
    [
        (RolloutFacts(WELL, answered=3), Kind.FINISHED, None),
        (RolloutFacts(RETURNED, answered=1), Kind.FINISHED, None),
        (RolloutFacts(WELL, answered=2, failed=1), Kind.FINISHED, None),
        (RolloutFacts(WELL, answered=2, refusals={"engine_unavailable": 1}), Kind.FINISHED, None),
        (RolloutFacts(WELL, answered=2, refusals={"store_failed": 1}), Kind.FINISHED, None),
        (RolloutFacts(WELL, answered=2, refusals={"invalid_request": 1}), Kind.FINISHED, None),
        (RolloutFacts(WELL), Kind.NO_MODEL_CALL, Cause.AGENT),
        (RolloutFacts(RETURNED), Kind.NO_MODEL_CALL, Cause.AGENT),
        (RolloutFacts(WELL, refusals={"invalid_request": 3}), Kind.NO_MODEL_CALL, Cause.AGENT),
        (RolloutFacts(WELL, failed=1), Kind.ENGINE_FAILED, Cause.ENGINE),
        (RolloutFacts(WELL, refusals={"engine_unavailable": 3}), Kind.ENGINE_FAILED, Cause.ENGINE),
        (RolloutFacts(BADLY, answered=2), Kind.CRASHED, Cause.AGENT),
        (RolloutFacts(BADLY), Kind.CRASHED, Cause.AGENT),
        (RolloutFacts(RAISED, answered=2), Kind.CRASHED, Cause.AGENT),
        (RolloutFacts(BADLY, refusals={"invalid_request": 1}), Kind.CRASHED, Cause.AGENT),
        (RolloutFacts(BADLY, answered=2, failed=1), Kind.ENGINE_FAILED, Cause.ENGINE),
        (RolloutFacts(RAISED, answered=2, refusals={"engine_connection_lost": 1}), Kind.ENGINE_FAILED, Cause.ENGINE),
        (RolloutFacts(BADLY, answered=2, refusals={"store_full": 1}), Kind.HARNESS_FAILED, Cause.HARNESS),
        (RolloutFacts(BADLY, refusals={"gate_closed": 3}), Kind.HARNESS_FAILED, Cause.HARNESS),
        (RolloutFacts(SEGFAULT, answered=2), Kind.CRASHED, Cause.AGENT),
        (RolloutFacts(SEGFAULT, answered=2, failed=1, refusals={"limit_reached": 1}), Kind.CRASHED, Cause.AGENT),
        (RolloutFacts(AgentEnd(Ending.EXITED, 127)), Kind.NOT_STARTED, Cause.AGENT),
        (RolloutFacts(AgentEnd(Ending.EXITED, 125, is_boxed=True)), Kind.SANDBOX_FAILED, Cause.HARNESS),
        (RolloutFacts(AgentEnd(Ending.EXITED, 125, is_boxed=True), answered=1), Kind.CRASHED, Cause.AGENT),
        (RolloutFacts(AgentEnd(Ending.EXITED, 125)), Kind.CRASHED, Cause.AGENT),
        (RolloutFacts(UNBOXED), Kind.SANDBOX_FAILED, Cause.HARNESS),
        (RolloutFacts(UNBOXED, answered=2, result=GARBAGE, is_drained=True), Kind.SANDBOX_FAILED, Cause.HARNESS),
        (RolloutFacts(AgentEnd(Ending.EXITED, 127), answered=1), Kind.CRASHED, Cause.AGENT),
        (RolloutFacts(LATE, answered=2, failed=1, refusals={"session_closed": 1}), Kind.TIMED_OUT, Cause.LIMIT),
        (RolloutFacts(STOPPED, answered=2), Kind.DRAINED, Cause.LIMIT),
        (RolloutFacts(STOPPED, refusals={"turn_aborted": 1}), Kind.DRAINED, Cause.LIMIT),
        (RolloutFacts(STOPPED, session_lost="gone"), Kind.HARNESS_FAILED, Cause.HARNESS),
        (RolloutFacts(UNSTARTED), Kind.NOT_STARTED, Cause.AGENT),
        (RolloutFacts(UNPREPARED), Kind.NOT_STARTED, Cause.HARNESS),
        (RolloutFacts(WELL, GARBAGE, answered=2), Kind.GARBAGE, Cause.AGENT),
        (RolloutFacts(RETURNED, GARBAGE), Kind.GARBAGE, Cause.AGENT),
        (RolloutFacts(BADLY, GARBAGE, answered=2), Kind.CRASHED, Cause.AGENT),
        (RolloutFacts(WELL, answered=2, refusals={"turn_aborted": 1}), Kind.ENGINE_FAILED, Cause.ENGINE),
        (RolloutFacts(BADLY, refusals={"turn_aborted": 1}, is_drained=True), Kind.DRAINED, Cause.LIMIT),
        (RolloutFacts(WELL, answered=2, is_drained=True), Kind.FINISHED, None),
        (RolloutFacts(WELL, answered=2, session_lost="GET: 500"), Kind.HARNESS_FAILED, Cause.HARNESS),
    ],
)
def test_an_ending_has_its_outcome(facts: RolloutFacts, kind: Kind, cause: Cause | None):
    outcome = classify(facts)

    assert (outcome.kind, outcome.cause) == (kind, cause)


@pytest.mark.parametrize("end", [WELL, BADLY, RETURNED, RAISED])
@pytest.mark.parametrize(
    ("code", "kind"),
    [("branch_ended", Kind.LIMITED), ("limit_reached", Kind.LIMITED), ("session_closed", Kind.DRAINED)],
)
def test_an_agent_that_was_refused_is_not_to_blame(end: AgentEnd, code: str, kind: Kind):
    """However it took the refusal: exit code 0, another one, an exception."""
    outcome = classify(RolloutFacts(end, answered=2, failed=1, refusals={code: 1}))

    assert (outcome.kind, outcome.cause) == (kind, Cause.LIMIT)


def test_every_combination_has_an_outcome():
    """No facts fall through the table, and an engine is never blamed for an agent that ended well after an answer."""
    codes = sorted(DRAIN_CODES | LIMIT_CODES | ENGINE_CODES | HARNESS_CODES | {"invalid_request"})
    refusals = [{}, *({code: 1} for code in codes)]
    ends = [AgentEnd(ending, code) for ending in Ending for code in (0, 1, 9)]
    results = [AgentResult(), GARBAGE]
    for end, result, answered, failed, refused in product(ends, results, (0, 1), (0, 1), refusals):
        outcome = classify(RolloutFacts(end, result, answered, failed, refused))

        assert (outcome.cause is None) == (outcome.kind is Kind.FINISHED)
        assert outcome.detail
        if answered and end in (WELL, RETURNED):
            assert outcome.kind is not Kind.ENGINE_FAILED


def test_the_detail_tells_the_story():
    facts = RolloutFacts(SEGFAULT, GARBAGE, answered=1, failed=2, refusals={"limit_reached": 2})

    assert classify(facts).detail == (
        "killed by SIGSEGV; 1 turn; 2 turns failed; refused: limit_reached x2; result unusable: not JSON"
    )


@pytest.mark.parametrize(
    ("code", "status", "kind", "cause"),
    [
        ("unreachable", 0, Kind.HARNESS_FAILED, Cause.HARNESS),
        ("internal_error", 500, Kind.HARNESS_FAILED, Cause.HARNESS),
        ("store_full", 503, Kind.HARNESS_FAILED, Cause.HARNESS),
        ("gate_closed", 503, Kind.DRAINED, Cause.LIMIT),
        ("engine_unavailable", 503, Kind.ENGINE_FAILED, Cause.ENGINE),
        ("invalid_request", 400, Kind.NOT_STARTED, Cause.SCENARIO),
        ("unauthorized", 401, Kind.NOT_STARTED, Cause.SCENARIO),
    ],
)
def test_a_session_that_was_not_created_has_its_outcome(code: str, status: int, kind: Kind, cause: Cause):
    """Who has to act depends on what the server said."""
    outcome = classify_uncreated(code, status, "words")

    assert (outcome.kind, outcome.cause, outcome.detail) == (kind, cause, "no session: words")


def test_processes_that_could_not_be_ended_are_named():
    """Beside how the agent itself ended."""
    assert AgentEnd(Ending.EXITED, 3, left=[17, 18]).words == "exit code 3; could not be ended: process 17, 18"
