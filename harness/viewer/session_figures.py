"""Figures of one session for a report: lengths, seconds, ends and versions of its turns, without tokens."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.decoding import convert
from harness.errors import UnknownWeightVersion
from harness.samples.versions import policy_version
from harness.sessions.ledger import Ledger
from harness.viewer.session_view import SessionView, TurnView


class TurnParts(NamedTuple):
    """Seconds of a turn by place."""

    held: float
    """At the gate, also before admission, or during a weight update."""
    queued: float
    """In the session server's pool, waiting for a worker."""
    engine: float
    """From the request to its answer, with the engine's own queue and the network."""
    server: float
    """The remaining seconds since admission: reading output, and requests without result."""


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """Figures of one session. `prompts`, `outputs` and `seconds` have one entry per turn, by admission."""

    prompts: Sequence[int]
    """Tokens."""
    outputs: Sequence[int]
    seconds: Sequence[float]
    """From admission to end."""
    parts: Sequence[TurnParts]
    """Parts of the turns whose record has request times."""
    between: Sequence[float]
    """Seconds between first and last turn without a turn under way or held: agent and tools."""
    began_at: float
    """Unix seconds of the first admission; 0 without turns, as `ended_at`."""
    ended_at: float
    ends: Counter[str]
    lags: Counter[int]
    """Sampled tokens by versions behind the session's newest, for numeric labels."""
    ledger: Ledger


def measure(session: SessionView) -> SessionFigures:
    """Measure `session`. Raises `ValueError` and similar errors for damaged numbers."""
    timed = sorted(session.turns, key=lambda turn: turn.created_at)
    between: list[float] = []
    ended_at = timed[0].created_at if timed else 0.0
    for turn in timed:
        arrived_at = turn.created_at - turn.held_before_s
        if arrived_at > ended_at:
            between.append(arrived_at - ended_at)
        ended_at = max(ended_at, turn.created_at + turn.seconds)
    parts = [each for each in map(split_seconds, session.turns) if each is not None]
    times = [[turn.created_at, turn.seconds, turn.held_before_s] for turn in timed]
    if not all(math.isfinite(each) for some in (*times, *parts) for each in some):
        raise ValueError("an invalid time")
    return SessionFigures(
        prompts=[int(turn.prompt_length) for turn in session.turns],
        outputs=[turn.output_length for turn in session.turns],
        seconds=[turn.seconds for turn in session.turns],
        parts=parts,
        between=between,
        began_at=timed[0].created_at if timed else 0.0,
        ended_at=ended_at,
        ends=Counter(str(turn.end) for turn in session.turns),
        lags=_lags(session.turns),
        ledger=convert(session.ledger or {"generated": 0}, Ledger),
    )


def split_seconds(turn: TurnView) -> TurnParts | None:
    """Return the parts of a turn's seconds; None if its record lacks request times."""
    if not turn.requests or any(each.get("began_at") is None for each in turn.requests):
        return None
    queued = sum(float(each.get("queued_s", 0.0)) for each in turn.requests)
    asked = sum(float(each.get("seconds", 0.0)) for each in turn.requests)
    rest = max(0.0, turn.seconds - asked - turn.held_s)
    return TurnParts(turn.held_before_s + turn.held_s, queued, max(0.0, asked - queued), rest)


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
