"""What a report counts of one session: lengths, seconds, ends and versions of its turns. Its tokens are not kept."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from harness.errors import UnknownWeightVersion
from harness.samples.versions import policy_version
from harness.sessions.ledger import Ledger
from harness.viewer.session_view import SessionView, TurnView


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """Of the turns in order of admission; `prompts`, `outputs` and `seconds` have one for each."""

    prompts: Sequence[int]
    """Tokens."""
    outputs: Sequence[int]
    """Tokens, sampled."""
    seconds: Sequence[float]
    """From admission to end: at the gate, in queues, in the engine."""
    between: Sequence[float]
    """Seconds in which no turn was under way, between the first one and the last: the agent and its tools."""
    began_at: float
    """Unix seconds of the first admission; 0 without turns, as `ended_at`."""
    ended_at: float
    ends: Counter[str]
    lags: Counter[int]
    """Sampled tokens by how many versions theirs is behind the newest of the session, where labels are numbers."""
    ledger: Ledger


def measure(session: SessionView) -> SessionFigures:
    """The figures of `session`. Raises `ValueError` and its like where a number is none."""
    timed = sorted(session.turns, key=lambda turn: turn.created_at)
    between: list[float] = []
    ended_at = timed[0].created_at if timed else 0.0
    for turn in timed:
        if turn.created_at > ended_at:
            between.append(turn.created_at - ended_at)
        ended_at = max(ended_at, turn.created_at + turn.seconds)
    if not all(math.isfinite(each) for turn in timed for each in (turn.created_at, turn.seconds)):
        raise ValueError("a time that is none")
    return SessionFigures(
        prompts=[int(turn.prompt_length) for turn in session.turns],
        outputs=[turn.output_length for turn in session.turns],
        seconds=[turn.seconds for turn in session.turns],
        between=between,
        began_at=timed[0].created_at if timed else 0.0,
        ended_at=ended_at,
        ends=Counter(str(turn.end) for turn in session.turns),
        lags=_lags(session.turns),
        ledger=msgspec.convert(session.ledger or {"generated": 0}, Ledger),
    )


def _lags(turns: Sequence[TurnView]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for turn in turns:
        for span in turn.versions:
            try:
                counts[policy_version(str(span["version"]))] += int(span["end"]) - int(span["start"])
            except UnknownWeightVersion:
                continue
    newest = max(counts, default=0)
    return Counter({newest - version: count for version, count in counts.items() if count > 0})
