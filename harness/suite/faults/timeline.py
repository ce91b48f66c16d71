"""The timeline of a scenario's faults: events in, due faults out. Pure.

A session is its position in the scenario; turns are counted from 1. A fault that has been due is not due again: one on
a single session is due once for each session, one on everything once. `_key` says what "the same fault" is: with it a
retried request, the later requests of a continued turn, and a clock that looks twice make nothing due a second time, so
callers may report an event as often as they see it.

Draws are a function of the session's seed, the fault's position and the turn: they depend neither on the order of
events nor on what else runs, and a resumed run draws the same faults (I10).
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from harness.suite.scenarios.fault import Fault


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
    """The session whose turn triggered it; None when the clock did."""
    turn: int = 0
    tokens: int = 0


class Timeline:
    """The faults of one scenario; `seeds` are those of its sessions."""

    def __init__(self, faults: Sequence[Fault], seeds: Mapping[int, int]) -> None:
        self._faults = faults
        self._seeds = seeds
        self._past: set[tuple[int | None, ...]] = set()

    def after(self, event: Event) -> list[Due]:
        """The faults that `event` makes due, in the order of the file."""
        due = [each for position in range(len(self._faults)) for each in self._due(position, event)]
        self._past |= {self._key(each) for each in due}
        return due

    def next_second(self) -> float | None:
        """When the clock makes the next fault due; None when it makes none any more."""
        timed = ((n, fault.at_second) for n, fault in enumerate(self._faults) if fault.at_second is not None)
        return min((at_s for position, at_s in timed if (position, None) not in self._past), default=None)

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
                if not fault.names(session):
                    comes = False
                elif fault.probability is None:
                    comes = fault.at_turn == turn and fault.at_token is None
                else:
                    digest = blake2b(f"{self._seeds[session]}:{position}:{turn}".encode(), digest_size=8).digest()
                    comes = int.from_bytes(digest) / 2**64 < fault.probability
                due = Due(position, session, turn) if comes else None
            case TokensSampled(session, turn, tokens):
                has_come = fault.at_token is not None and fault.at_turn == turn and fault.at_token <= tokens
                due = Due(position, session, turn, tokens) if has_come and fault.names(session) else None
        if due is not None and self._key(due) not in self._past:
            yield due

    def _key(self, due: Due) -> tuple[int | None, ...]:
        """The identity under which `due` comes only once: a fault with a probability is drawn for every turn."""
        fault = self._faults[due.position]
        if fault.probability is not None:
            return due.position, due.session, due.turn
        return due.position, None if fault.is_on_everything else due.session
