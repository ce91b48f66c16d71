"""A run to look at, the same each time: four sessions with a crash, a fork and an update of the weights.

Turns come from the session core, on the tokens of the toy tokenizer; their times are set by hand.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from msgspec import convert

from harness.samples.delivery import Selection
from harness.sessions.ledger import Ledger, total
from harness.sessions.record import session_record
from harness.sessions.session import Session
from harness.types import FinishReason
from harness.viewer.page.run_page import write_page
from harness.viewer.run_view import Band, RunView, SessionLine
from harness.viewer.session_view import SessionView
from tests.builders import new_session, take_turn, toy_tokenizer, user

BEGAN_AT = 1_700_000_000.0
BANDS = (
    Band("pause", BEGAN_AT + 3.0, BEGAN_AT + 3.4, "by evaluation"),
    Band("update", BEGAN_AT + 6.5, BEGAN_AT + 7.6, "by trainer"),
    Band("fault", BEGAN_AT + 6.9, BEGAN_AT + 6.9, "abort_engine, aborted 2 requests"),
    Band("drain", BEGAN_AT + 9.0, None, "by operator"),
)
CRASH = "KeyError: 'answer' in agent.py, line 31"


def write_viewed_run(path: Path) -> None:
    """Write the page of the run to `path`."""
    sessions = viewed_sessions()
    write_page(path, viewed_run(sessions), lambda session_id: sessions[session_id], toy_tokenizer())


def viewed_sessions() -> Mapping[str, SessionView]:
    """The sessions by their ids."""
    return {
        str(number) * 32: _timed(session, str(number) * 32, number)
        for number, session in enumerate((_long(), _updated(), _forked(), _cut_short()))
    }


def viewed_run(sessions: Mapping[str, SessionView]) -> RunView:
    """The run with these sessions; the last one crashed."""
    lines = [
        SessionLine(
            session_id,
            number=number,
            scenario="games",
            outcome="crashed" if number == 3 else "finished",
            cause="agent" if number == 3 else None,
            last_words=CRASH if number == 3 else None,
            reward=None if number == 3 else 0.5,
            turns=len(session.turns),
            sampled=sum(turn.output_length for turn in session.turns),
        )
        for number, (session_id, session) in enumerate(sessions.items())
    ]
    ledger = total(convert(session.ledger, Ledger) for session in sessions.values()).to_json()
    return RunView("games", lines, status="passed", suite="games", ledger=ledger, bands=BANDS)


def _long() -> Session:
    session = new_session()
    messages = [user("Guess my number. It is from 1 to 20.")]
    for guess, answer in (("Is it 10?", "Too low."), ("Is it 15?", "Too high."), ("Is it 12?", "That is right!")):
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
    return replace(view, session_id=session_id, phase="closed", turns=turns)
