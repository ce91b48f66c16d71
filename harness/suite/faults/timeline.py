"""Timeline of a scenario's faults: maps events to due faults. Pure.

A session is its position; turns count from 1. A fault on one session is due once per session, one on everything once.
By `_key`, retries, later requests of a turn and repeated looks at the clock make nothing due again, so callers may
repeat events. Draws depend only on session seed, fault position and turn, so resumed runs repeat them (I10).
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from harness.suite.scenarios.fault import Fault


class TurnBegan(NamedTuple):
    session: int
    turn: int


class TokensSampled(NamedTuple):
    session: int
    turn: int
    tokens: int


class TimePassed(NamedTuple):
    """Seconds since the scenario began."""

    at_s: float


Event = TurnBegan | TokensSampled | TimePassed


class Due(NamedTuple):
    position: int
    """The fault's position in the scenario."""
    session: int | None = None
    """Session that triggered it; None for the clock."""
    turn: int = 0
    tokens: int = 0


class Timeline:
    """Faults of one scenario, with its sessions' seeds."""

    def __init__(self, faults: Sequence[Fault], seeds: Mapping[int, int]) -> None:
        self._faults = faults
        self._seeds = seeds
        self._past: set[tuple[int | None, ...]] = set()

    def after(self, event: Event) -> list[Due]:
        """Return the faults that `event` makes due, in file order."""
        due = [each for position in range(len(self._faults)) for each in self._due(position, event)]
        self._past |= {self._key(each) for each in due}
        return due

    def next_second(self) -> float | None:
        """Return the next timed fault's second, if any."""
        timed = ((n, fault.at_second) for n, fault in enumerate(self._faults) if fault.at_second is not None)
        return min((at_s for position, at_s in timed if (position, None) not in self._past), default=None)

    def counts_tokens(self, session: int, turn: int) -> bool:
        """Return True if a fault waits for the turn's tokens."""
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
        """Return the key under which `due` happens once. A probability is drawn for every turn."""
        fault = self._faults[due.position]
        if fault.probability is not None:
            return due.position, due.session, due.turn
        return due.position, None if fault.is_on_everything else due.session
