"""Runs to look at, the same each time: a crash, a fork, a stray call, an update of the weights, and training steps.

Turns come from the session core, on the tokens of the toy tokenizer; their times are set by hand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, sin
from pathlib import Path

from msgspec import convert

from harness.samples.delivery import Selection
from harness.sessions.ledger import Ledger, total
from harness.sessions.record import session_record
from harness.sessions.session import Session
from harness.types import FinishReason, Json
from harness.viewer.page.run_page import Side, write_page
from harness.viewer.run_view import Band, RunView, SessionLine
from harness.viewer.session_view import SessionView, TurnView
from tests.builders import new_session, take_turn, toy_tokenizer, user

BEGAN_AT = 1_700_000_000.0
BANDS = (
    Band("pause", BEGAN_AT + 3.0, BEGAN_AT + 3.4, "by evaluation"),
    Band("update", BEGAN_AT + 6.5, BEGAN_AT + 7.6, "by trainer"),
    Band("fault", BEGAN_AT + 6.9, BEGAN_AT + 6.9, "abort_engine, aborted 2 requests"),
    Band("drain", BEGAN_AT + 9.0, None, "by operator"),
)
CRASH = "KeyError: 'answer' in agent.py, line 31"
LOG = f"reading the task\ncalling the model\nTraceback (most recent call last):\n{CRASH}\n"
REWARDS = (1.0, 0.0, 0.25, None)
WHY_ZERO = "expected blue, the last answer says green"
STEPS = tuple(
    {
        "rollout/reward_mean": 0.2 + 0.6 * (1 - exp(-step / 12)) + 0.04 * sin(step * 1.7),
        "rollout/response_length_mean": 180 + 4 * step + 12 * sin(step),
        "train/kl": 0.002 * step + 0.004 * (1 + sin(step * 2.3)),
        "rollout/staleness_mean": 1 + 0.5 * sin(step / 2),
        "rollout/dropped/stale": float(max(0, 40 - step)),
        "train/loss": 0.4 * exp(-step / 20) + 0.02 * sin(step * 3),
    }
    for step in range(60)
)


def write_viewed_run(path: Path) -> None:
    """Write the page of the run to `path`, and the log of its crashed agent beside it."""
    write_page(path, _side(viewed_run(viewed_sessions(), _log_beside(path)), viewed_sessions()))


def write_viewed_training(path: Path) -> None:
    """Write the page of a training run."""
    write_page(path, _side(replace(viewed_run(viewed_sessions()), steps=STEPS, suite="training"), viewed_sessions()))


def write_viewed_diff(path: Path) -> None:
    """Write the page of two runs, of which session 0 continues otherwise in the second."""
    sessions = viewed_sessions(), viewed_sessions(second_guess="Is it 16?")
    first, second = (viewed_run(each) for each in sessions)
    sides = _side(first, sessions[0]), _side(second, sessions[1])
    write_page(path, *sides, pairs=list(zip(first.sessions, second.sessions, strict=True)))


def _side(view: RunView, sessions: Mapping[str, SessionView]) -> Side:
    return Side(view, lambda session_id: sessions[session_id], toy_tokenizer())


def _log_beside(page: Path) -> Path:
    log = page.with_name("agent.log")
    log.write_text(LOG, "utf-8")
    return log


def viewed_sessions(second_guess: str = "Is it 15?") -> Mapping[str, SessionView]:
    """The sessions by their ids."""
    return {
        str(number) * 32: _timed(session, str(number) * 32, number)
        for number, session in enumerate((_long(second_guess), _updated(), _forked(), _cut_short()))
    }


def viewed_run(sessions: Mapping[str, SessionView], log: Path | None = None) -> RunView:
    """The run with these sessions, two of a prompt; the last one crashed and left `log`."""
    lines = [
        SessionLine(
            session_id,
            number=number,
            scenario="games",
            group=number // 2,
            outcome="crashed" if number == 3 else "finished",
            cause="agent" if number == 3 else None,
            last_words=CRASH if number == 3 else None,
            agent_log=log if number == 3 else None,
            reward=REWARDS[number],
            score={"figures": {"format": 1.0, "answer": REWARDS[number]}, "reason": WHY_ZERO if number == 1 else ""},
            turns=len(session.turns),
            sampled=sum(turn.output_length for turn in session.turns),
        )
        for number, (session_id, session) in enumerate(sessions.items())
    ]
    ledger = total(convert(session.ledger, Ledger) for session in sessions.values()).to_json()
    return RunView("games", lines, status="passed", suite="games", ledger=ledger, bands=BANDS)


def _long(second_guess: str) -> Session:
    session = new_session()
    messages = [user("Guess my number. It is from 1 to 20.")]
    for guess, answer in (("Is it 10?", "Too low."), (second_guess, "Too high."), ("Is it 12?", "That is right!")):
        turn = take_turn(session, messages, guess, version="1")
        messages += [turn.reply, user(answer)]
    return session


def _updated() -> Session:
    session = new_session()
    first = take_turn(session, [user("Name a color.")], "Before: red.", version="1")
    second = take_turn(session, [user("Name a color."), first.reply, user("More.")], "After: blue.", version="2")
    take_turn(
        session,
        [user("Name a color."), first.reply, user("More."), second.reply, user("More.")],
        "And green",
        reason=FinishReason.LENGTH,
        version="2",
    )
    return session


def _forked() -> Session:
    session = new_session(selection=Selection.ONE)
    first = take_turn(session, [user("Left or right?")], "Let me see.", version="1")
    take_turn(session, [user("Left or right?"), first.reply, user("Well?")], "It must be left.", version="1")
    take_turn(session, [user("Left or right?"), first.reply, user("Think.")], "It must be right.", version="2")
    return session


def _cut_short() -> Session:
    session = new_session()
    take_turn(session, [user("What is 6 times 7?")], "It is 42.", version="1")
    return session


def _timed(session: Session, session_id: str, number: int) -> SessionView:
    view = SessionView.of(session_record(session))
    turns = [
        replace(turn, created_at=BEGAN_AT + number / 2 + 4.0 * turn.index, seconds=2.5 + number / 4)
        for turn in view.turns
    ]
    if number == 0:
        turns = _with_calls(turns)
    metadata = {"prompt": f"games-{number // 2}", "user": "trial"}
    return replace(view, session_id=session_id, phase="closed", turns=turns, metadata=metadata)


def long_turn(length: int, **more: Json) -> TurnView:
    """A turn of that many tokens, of which the last ten are masked."""
    return TurnView.of(
        {
            "turn": 0,
            "parent": None,
            "status": "completed",
            "end": "model",
            "output_length": length,
            "masked_from": length - 10,
            "output_ids": list(range(length)),
            "logprobs": [-0.5] * length,
            "weight_versions": [{"version": "7", "start": 0, "end": length}],
            **more,
        }
    )


def _with_calls(turns: Sequence[TurnView]) -> list[TurnView]:
    guess = {"id": "call-1", "type": "function", "function": {"name": "guess", "arguments": '{"number": 15}'}}
    thinking = "10 was too low, so it is from 11 to 20. The middle is 15."
    reply = {**turns[1].reply, "reasoning_content": thinking, "tool_calls": [guess]}
    answered = [{"role": "tool", "tool_call_id": "call-1", "content": "too high"}, *turns[2].messages]
    stray = {"role": "stray", "evidence": "the program pytest, which began below agent after turn 1"}
    return [turns[0], replace(turns[1], reply=reply), replace(turns[2], messages=answered, **stray)]
