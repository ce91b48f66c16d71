"""Which fault is due when: events in, due faults out. Pure.

A session is its position in the scenario, a turn is counted from 1. What has been due is not due again: a fault on one
session once for every session, a fault on everything once. Draws are a function of the session's seed, the fault's
position and the turn, so they depend neither on the order of events nor on what else runs (I10).
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from harness.suite.faults.spec import Fault


class TurnBegan(NamedTuple):
    """A session makes a model call."""

    session: int
    turn: int


class TokensSampled(NamedTuple):
    """A turn has come to so many tokens."""

    session: int
    turn: int
    tokens: int


class TimePassed(NamedTuple):
    """So many seconds since the scenario began."""

    at_s: float


Event = TurnBegan | TokensSampled | TimePassed


class Due(NamedTuple):
    """A fault whose moment is now."""

    position: int
    """Of the fault among those of the scenario."""
    session: int | None = None
    """Whose turn triggered it; None when the clock did."""
    turn: int = 0
    tokens: int = 0


class Timeline:
    """The faults of one scenario; `seeds` are those of its sessions."""

    def __init__(self, faults: Sequence[Fault], seeds: Mapping[int, int]) -> None:
        self._faults = faults
        self._seeds = seeds
        self._past: set[tuple[int | None, ...]] = set()

    def after(self, event: Event) -> list[Due]:
        """What `event` makes due, in the order of the file."""
        due = [each for position in range(len(self._faults)) for each in self._due(position, event)]
        self._past |= {self._key(each) for each in due}
        return due

    def next_second(self) -> float | None:
        """When the clock makes the next fault due; None when it makes none any more."""
        coming = (at_s for position, at_s in self._of_the_clock() if (position, None) not in self._past)
        return min(coming, default=None)

    def counts_tokens(self, session: int, turn: int) -> bool:
        """Whether a fault waits for a token of that turn."""
        return any(
            fault.at_token is not None and fault.at_turn == turn and fault.names(session) for fault in self._faults
        )

    def _due(self, position: int, event: Event) -> Iterator[Due]:
        fault = self._faults[position]
        match event:
            case TimePassed(at_s):
                due = Due(position) if fault.at_second is not None and fault.at_second <= at_s else None
            case TurnBegan(session, turn):
                due = Due(position, session, turn) if self._comes_with(position, session, turn) else None
            case TokensSampled(session, turn, tokens):
                has_come = fault.at_token is not None and fault.at_turn == turn and fault.at_token <= tokens
                due = Due(position, session, turn, tokens) if has_come and fault.names(session) else None
        if due is not None and self._key(due) not in self._past:
            yield due

    def _comes_with(self, position: int, session: int, turn: int) -> bool:
        """Whether the fault comes with the beginning of a turn."""
        fault = self._faults[position]
        if not fault.names(session):
            return False
        if fault.probability is not None:
            return self._draw(position, session, turn) < fault.probability
        return fault.at_turn == turn and fault.at_token is None

    def _draw(self, position: int, session: int, turn: int) -> float:
        """Uniform in [0, 1)."""
        digest = blake2b(f"{self._seeds[session]}:{position}:{turn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64

    def _key(self, due: Due) -> tuple[int | None, ...]:
        """What must not be due twice."""
        fault = self._faults[due.position]
        if fault.probability is not None:
            return due.position, due.session, due.turn
        return due.position, None if fault.is_on_everything else due.session

    def _of_the_clock(self) -> Iterator[tuple[int, float]]:
        return ((n, fault.at_second) for n, fault in enumerate(self._faults) if fault.at_second is not None)
