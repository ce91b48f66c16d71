"""Sessions that are paged out: what memory keeps of one that the store has whole, and when that may be.

A session is let go only when its rows say all that memory says of its turns: their *outlines* are equal, and none is in
flight. A turn that the store refused, scores that it has not, an answer whose delivery it has not noted: each keeps the
session in memory. What no row has stays in the *stub*. So a session that is read back is the one that was let go, and
its ledger proves it.

The shell reads rows, and knows who uses a session (`server.held_sessions`); nothing here does.
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
    """A recorded turn, as far as it can change or be missing; by its digest, the prompt stands for what came before."""

    turn: int
    parent: int | None
    status: str
    end: str
    prompt_digest: str
    output_bytes: int
    """Of its ids, four each."""
    delivered: bool
    discarded: tuple[Discarded, ...]
    unknown: tuple[UnknownOutput, ...]
    proximal_versions: bytes | None
    """Little-endian int32; None while every token holds its behavior value."""


class SessionOutline(NamedTuple):
    """A session as its rows tell it, or as memory does."""

    phase: str
    turns: tuple[TurnOutline, ...]


def outline(session: Session) -> SessionOutline:
    """The outline of `session` as it is in memory."""
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
    """A session that is paged out; about 1 KiB, however long the session is."""

    session_id: str
    key_digest: bytes
    """Finds it by its key, which only the store has."""
    phase: Phase
    created_at: float
    turn_count: int
    ledger: Ledger
    refusals: Mapping[str, int]
    awaits: Mapping[int, Waiting]
    """By policy version, the tokens that wait for it. Only the newest eight: a version that so many updates have
    passed does not come any more, and its tokens keep their behavior values (I7)."""
    lasted: tuple[float, float] | None = None
    """Unix seconds at which the first of its calls came and the last of its turns ended; None without turns."""
    closed_because: CloseReason | None = None
    deliveries: Mapping[int, bool] = field(default_factory=dict)
    """Whether turns were delivered, as it turned out since: their rows may not say so yet."""

    @property
    def is_open(self) -> bool:
        """Turns may start, once it has been read back."""
        return (self.phase, Command.ADMIT) in TRANSITIONS

    @property
    def sampled(self) -> int:
        """Tokens sampled for its turns."""
        return self.ledger.generated

    @property
    def turns_in_flight(self) -> tuple[Admission, ...]:
        """None: a session with one is not paged out."""
        return ()

    def drain(self) -> Self:
        """The stub after a drain; itself where nothing changes."""
        return self._command(Command.DRAIN)

    def close(self, reason: CloseReason) -> Self:
        """The stub of the session after its end; the reason of an earlier one stands."""
        return replace(self._command(Command.CLOSE), closed_because=self.closed_because or reason)

    def mark_delivered(self, index: int, *, delivered: bool) -> Self:
        """The stub when it turns out whether the answer of a turn was handed over."""
        return replace(self, deliveries={**self.deliveries, index: delivered})

    def _command(self, command: Command) -> Self:
        phase = advance(self.phase, command)
        return self if phase is self.phase else replace(self, phase=phase)


def page_out(
    session: Session, kept: SessionOutline | None, key_digest: bytes, is_comparable: IsComparable
) -> SessionStub | None:
    """What stays of `session` in memory, whose rows have the outline `kept`; None when it may not be let go now."""
    if session.turns_in_flight or session.phase is Phase.CLOSED or outline(session) != kept:
        return None
    return stub_of(session, key_digest, is_comparable)


def stub_of(session: Session, key_digest: bytes, is_comparable: IsComparable) -> SessionStub:
    """What stays of `session` in memory, of which the store is known to have all."""
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
    """Turns of `session` of whose delivery the rows with the outline `kept` say something else.

    A note may be lost, and nobody knows after a restart whether the last answers were read.
    """
    noted = {} if kept is None else {turn.turn: turn.delivered for turn in kept.turns}
    return [turn for turn in outline(session).turns if noted.get(turn.turn, turn.delivered) != turn.delivered]


def bring_back(stub: SessionStub, session: Session) -> None:
    """Make `session`, as it was read from its rows, the one that was paged out as `stub`.

    Raises `StoreError` when the rows have become others.
    """
    ledger = session.ledger()
    if (len(session.turns), ledger) != (stub.turn_count, stub.ledger):
        raise StoreError(
            f"session {session.session_id} was paged out with {stub.turn_count} turns and {stub.ledger.generated}"
            f" sampled tokens; the store has {len(session.turns)} and {ledger.generated}: somebody has changed its rows"
        )
    session.phase, session.closed_because = stub.phase, stub.closed_because
    session.refusals = Counter(stub.refusals)
    for index, delivered in stub.deliveries.items():
        session.mark_delivered(index, delivered=delivered)


def waiting_of(held: Session | SessionStub, version: int, is_comparable: IsComparable) -> Waiting:
    """How many tokens of a session wait for `version`, wherever it is."""
    if isinstance(held, SessionStub):
        return held.awaits.get(version, NOTHING_WAITING)
    return count_waiting(held, version, is_comparable)
