"""A few lines of a dialogue, for whoever wants to see what the numbers are about."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.store.sqlite import read_session
from harness.suite.record.rollout_table import RolloutRecord
from harness.types import Message, Turn

_MAX_TURNS = 4


class Line(NamedTuple):
    """One message of a dialogue."""

    role: str
    text: str


class Excerpt(NamedTuple):
    """The beginning of one session."""

    number: int
    lines: Sequence[Line]
    turns_left: int
    """Turns that are not shown."""


def excerpt(database: Path, records: Sequence[RolloutRecord]) -> Excerpt | None:
    """The beginning of the session with the best reward among those with several turns; None when there is none."""
    told = [record for record in records if record.is_settled and record.session.turns > 1]
    if not told:
        return None
    best = max(told, key=lambda record: record.reward or 0.0)
    session = read_session(database, str(best.session_id))
    shown = session.turns[:_MAX_TURNS]
    lines = [line for turn in shown for line in _lines_of(turn)]
    return Excerpt(best.number, lines, len(session.turns) - len(shown))


def _lines_of(turn: Turn) -> Iterator[Line]:
    """What the model was asked last, and what it said; examples and earlier messages are left out."""
    if turn.messages_delta:
        yield Line(str(turn.messages_delta[-1]["role"]), _text(turn.messages_delta[-1]))
    yield Line("assistant", _text(turn.reply))


def _text(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    words = [message.get("content") or "", *(f"{call['name']}({call['arguments']})" for call in calls)]
    return " ".join(word.strip() for word in words if word)
