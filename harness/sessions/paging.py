"""Evicted sessions: the stub in memory, and when to evict.

A session is evicted only if its rows and memory have equal *outlines*. Facts in no row stay in the *stub*, so the
reloaded session equals the evicted one; its ledger proves it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from harness.errors import StoreError
from harness.sessions.ledger import Ledger
from harness.sessions.lifecycle import TRANSITIONS, CloseReason, Command, Phase, advance
from harness.sessions.session import IsComparable, Session
from harness.sessions.turn_outcome import Admission
from harness.sessions.weights.scoring import NOTHING_WAITING, Waiting, count_waiting
from harness.types import Discarded, UnknownOutput

_MOST_VERSIONS = 8


class TurnOutline(NamedTuple):
    """Everything of a turn that can change or be missing."""

    turn: int
    parent: int | None
    status: str
    end: str
    prompt_digest: str
    output_bytes: int
    """Four per id."""
    delivered: bool
    discarded: tuple[Discarded, ...]
    unknown: tuple[UnknownOutput, ...]
    proximal_versions: bytes | None
    """Little-endian int32."""


class SessionOutline(NamedTuple):
    """Session in its rows or in memory."""

    phase: str
    turns: tuple[TurnOutline, ...]


def outline(session: Session) -> SessionOutline:
    return SessionOutline(
        str(session.phase),
        tuple(
            TurnOutline(
                turn.index,
                turn.parent,
                str(turn.status),
                str(turn.end),
                turn.prompt_digest,
                turn.output_ids.nbytes,
                turn.delivered,
                turn.discarded,
                turn.unknown,
                None if turn.proximal_versions is None else turn.proximal_versions.astype("<i4").tobytes(),
            )
            for turn in session.turns
        ),
    )


@dataclass(frozen=True, slots=True)
class SessionStub:
    """Evicted session, about 1 KiB."""

    session_id: str
    key_digest: bytes
    """Only the store has the key."""
    phase: Phase
    created_at: float
    turn_count: int
    ledger: Ledger
    refusals: Mapping[str, int]
    awaits: Mapping[int, Waiting]
    """Waiting tokens by policy version (I7)."""
    lasted: tuple[float, float] | None = None
    closed_because: CloseReason | None = None
    deliveries: Mapping[int, bool] = field(default_factory=dict)
    """Noted after eviction; rows may lack them."""

    @property
    def is_open(self) -> bool:
        """True if turns may start once loaded."""
        return (self.phase, Command.ADMIT) in TRANSITIONS

    @property
    def sampled(self) -> int:
        return self.ledger.generated

    @property
    def turns_in_flight(self) -> tuple[Admission, ...]:
        """Always empty."""
        return ()

    def drain(self) -> Self:
        return self._command(Command.DRAIN)

    def close(self, reason: CloseReason) -> Self:
        """Return the closed stub; an earlier reason stands."""
        return replace(self._command(Command.CLOSE), closed_because=self.closed_because or reason)

    def mark_delivered(self, index: int, *, delivered: bool) -> Self:
        return replace(self, deliveries={**self.deliveries, index: delivered})

    def _command(self, command: Command) -> Self:
        phase = advance(self.phase, command)
        return self if phase is self.phase else replace(self, phase=phase)


def page_out(
    session: Session, kept: SessionOutline | None, key_digest: bytes, is_comparable: IsComparable
) -> SessionStub | None:
    """Return the stub of a session with the stored outline `kept`; None if it must stay."""
    # A refused turn, unsaved scores or an unnoted delivery keeps the session in memory.
    if session.turns_in_flight or session.phase is Phase.CLOSED or outline(session) != kept:
        return None
    return stub_of(session, key_digest, is_comparable)


def stub_of(session: Session, key_digest: bytes, is_comparable: IsComparable) -> SessionStub:
    """Return the stub of a fully stored session."""
    # A version that eight updates have passed never comes; its tokens keep their behavior values (I7).
    awaited = sorted(session.awaited_versions)[-_MOST_VERSIONS:]
    waiting = {version: count_waiting(session, version, is_comparable) for version in awaited}
    return SessionStub(
        session.session_id,
        key_digest,
        session.phase,
        session.created_at,
        len(session.turns),
        session.ledger(),
        dict(session.refusals),
        {version: count for version, count in waiting.items() if count != NOTHING_WAITING},
        session.lasted,
    )


def find_unnoted(session: Session, kept: SessionOutline | None) -> list[TurnOutline]:
    """Return turns whose stored delivery differs."""
    # A note can be lost, and a restart doubts the last ones.
    noted = {} if kept is None else {turn.turn: turn.delivered for turn in kept.turns}
    return [turn for turn in outline(session).turns if noted.get(turn.turn, turn.delivered) != turn.delivered]


def bring_back(stub: SessionStub, session: Session) -> None:
    """Apply `stub` to the loaded session. Raise `StoreError` if its rows changed."""
    # First, because the ledger depends on them: of two answers to one prompt, the delivered one is the agent's.
    for index, delivered in stub.deliveries.items():
        session.mark_delivered(index, delivered=delivered)
    ledger = session.ledger()
    if (len(session.turns), ledger) != (stub.turn_count, stub.ledger):
        raise StoreError(
            f"session {session.session_id} was paged out with {stub.turn_count} turns and {stub.ledger.generated}"
            f" sampled tokens; the store has {len(session.turns)} and {ledger.generated}:"
            " another program has changed its rows"
        )
    session.phase, session.closed_because = stub.phase, stub.closed_because
    session.refusals = Counter(stub.refusals)


def waiting_of(held: Session | SessionStub, version: int, is_comparable: IsComparable) -> Waiting:
    if isinstance(held, SessionStub):
        return held.awaits.get(version, NOTHING_WAITING)
    return count_waiting(held, version, is_comparable)
