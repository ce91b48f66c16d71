"""Timeline of a scenario's faults: maps events to due faults. Pure.

A session is its position; turns count from 1. A fault on one session is due once per session, one on everything once.
By `_key`, retries, later requests of a turn and repeated looks at the clock make nothing due again, so callers may
repeat events. Draws depend only on session seed, fault position and turn, so resumed runs repeat them (I10).
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from harness.suite.scenarios.fault import Fault


class Event(NamedTuple):
    """A turn begins or has sampled tokens or, without a session, time passes."""

    session: int | None = None
    turn: int = 0
    tokens: int | None = None
    """Tokens of the turn so far; None when it begins."""
    at_s: float = 0.0
    """Seconds since the scenario began, without a session."""


class Timeline:
    """Faults of one scenario, with its sessions' seeds."""

    def __init__(self, faults: Sequence[Fault], seeds: Mapping[int, int]) -> None:
        self._faults = faults
        self._seeds = seeds
        self._past: set[tuple[int | None, ...]] = set()

    def after(self, event: Event) -> list[int]:
        """Return the positions of the faults that `event` makes due, in file order."""
        due = [each for each in range(len(self._faults)) if self._is_due(each, event)]
        self._past |= {self._key(each, event) for each in due}
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

    def _is_due(self, position: int, event: Event) -> bool:
        fault = self._faults[position]
        if self._key(position, event) in self._past:
            return False
        if event.session is None:
            return fault.at_second is not None and fault.at_second <= event.at_s
        if not fault.names(event.session) or (fault.at_token is None) is not (event.tokens is None):
            return False
        if fault.probability is not None:
            seeded = f"{self._seeds[event.session]}:{position}:{event.turn}".encode()
            return int.from_bytes(blake2b(seeded, digest_size=8).digest()) / 2**64 < fault.probability
        return fault.at_turn == event.turn and (fault.at_token or 0) <= (event.tokens or 0)

    def _key(self, position: int, event: Event) -> tuple[int | None, ...]:
        """Return the key under which the fault happens once. A probability is drawn for every turn."""
        fault = self._faults[position]
        if fault.probability is not None:
            return position, event.session, event.turn
        return position, None if fault.is_on_everything else event.session
