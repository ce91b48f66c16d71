"""What a Harbor trial tells of its session, without Harbor: `rollout_details` are the samples."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.adapters.harbor.details import context_fields, outcome_of
from harness.errors import LimitReached, SessionClosing
from harness.rollouts.client.session_server import Collected, SessionFacts
from harness.samples.rollout import Outcome, OutcomeKind
from harness.sessions.record import RecordIds, empty_record, session_record
from harness.sessions.session import Session
from harness.turn_ends import TurnStatus
from harness.types import FinishReason, Message
from tests.builders import assistant, new_session, prompt_of, take_turn, user

FINISHED = Outcome(OutcomeKind.FINISHED, None)
MAIN, HELPER = ({"role": "system", "content": each} for each in ("You solve.", "You summarize."))

PLAYS = st.lists(
    st.tuples(
        st.integers(0, 3),  # the conversation that continues
        st.sampled_from(["continue", "again", "once more"]),
        st.sampled_from(["yes", "no", "a longer answer"]),
        st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
        st.sampled_from(["0", "1"]),
    ),
    min_size=1,
    max_size=8,
)


def record_of(session: Session, **facts: Any) -> Collected:
    """The session as its server gives it to the agent's owner."""
    told = SessionFacts(phase=str(session.phase), **facts)
    return Collected(told, session_record(session, RecordIds.NONE), tuple(session.samples(None)))


@given(PLAYS)
def test_details_are_the_samples(plays: list[tuple[int, str, str, FinishReason, str]]) -> None:
    """Of any history: each turn's prompt is the sample up to it, and its columns are those of its span."""
    session = new_session()
    talks: list[list[Message]] = [[MAIN if each == 0 else HELPER, user(f"{each}?")] for each in range(4)]
    for number, question, text, reason, version in plays:
        take_turn(session, talks[number], text, reason=reason, version=version)
        if reason is FinishReason.STOP:
            talks[number] += [assistant(text), user(question)]
    record = record_of(session)

    fields = context_fields("id", FINISHED, record)

    shown = sorted(record.samples, key=lambda sample: sample.metadata["role"] != "main")
    assert [each["role"] for each in fields["metadata"]["samples"]] == [each.metadata["role"] for each in shown]
    for detail, sample in zip(fields["rollout_details"], shown, strict=True):
        turns = [session.turns[index] for index in detail["extra"]["turn"]]
        assert detail["prompt_token_ids"] == [prompt_of(session, turn) for turn in turns]
        assert detail["completion_token_ids"] == [turn.output_ids.tolist() for turn in turns]
        assert detail["logprobs"] == [turn.logprobs.tolist() for turn in turns]
        versions = [[int(turn.version_spans[0].version)] * turn.output_ids.size for turn in turns]
        assert detail["extra"]["behavior_versions"] == versions
        assert sum(map(sum, detail["extra"]["loss_mask"])) == sample.loss_mask.sum()
        whole = detail["prompt_token_ids"][-1] + detail["completion_token_ids"][-1]
        assert whole == sample.tokens.tolist()
    trained = sum(sum(map(sum, each["extra"]["loss_mask"])) for each in fields["rollout_details"])
    assert trained == fields["metadata"]["ledger"]["trained"]
    assert fields["n_output_tokens"] == sum(turn.output_ids.size for turn in session.turns)
    assert fields["n_input_tokens"] == sum(turn.prompt_length for turn in session.turns)


LOST = Collected(SessionFacts(phase=""), empty_record(None, None), lost="no contact")
DELETED = Collected(SessionFacts(phase="unknown"), empty_record("id"))


def facts(phase: str, **refusals: int) -> Collected:
    """A session with one turn, in that phase after the agent."""
    told = SessionFacts(phase, {TurnStatus.COMPLETED: 1}, refusals)
    return Collected(told, empty_record("id", phase))


@pytest.mark.parametrize(
    ("failure", "record", "kind"),
    [
        (None, facts("ended"), OutcomeKind.FINISHED),
        (None, facts("closing"), OutcomeKind.FINISHED),  # it had ended before the abort
        (None, facts("closing", **{SessionClosing.code: 1}), OutcomeKind.DRAINED),
        (RuntimeError("exit code 1"), facts("ended"), OutcomeKind.CRASHED),
        (RuntimeError("exit code 1"), facts("ended", **{LimitReached.code: 1}), OutcomeKind.LIMITED),
        (RuntimeError("exit code 1"), facts("closing"), OutcomeKind.DRAINED),
        (asyncio.CancelledError(), facts("ended"), OutcomeKind.TIMED_OUT),
        (asyncio.CancelledError(), facts("closing"), OutcomeKind.DRAINED),
        (RuntimeError("exit code 1"), DELETED, OutcomeKind.DRAINED),
        (None, LOST, OutcomeKind.HARNESS_FAILED),
        (RuntimeError("exit code 1"), LOST, OutcomeKind.HARNESS_FAILED),
    ],
)
def test_outcomes(failure: BaseException | None, record: Collected, kind: OutcomeKind) -> None:
    """A trial whose session ended before its agent is aborted, whatever the agent makes of it."""
    outcome = outcome_of(failure, record)

    assert outcome.kind is kind
    assert context_fields("id", outcome, record)["metadata"]["aborted"] is (kind is OutcomeKind.DRAINED)


def test_a_long_error_is_cut() -> None:
    """Harbor's errors hold the output of commands."""
    outcome = outcome_of(RuntimeError("x" * 10_000), facts("ended"))

    assert "RuntimeError: xxx" in outcome.detail
    assert len(outcome.detail) < 300
