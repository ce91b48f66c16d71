"""The seam between the server and what makes sessions durable.

Promise (I9): when `create`, `take_over`, `commit`, `keep_scores`, `set_phase`, `keep_hold`, `drop_hold` or `keep_label`
returns, what it wrote survives `kill -9` of this process. `mark_delivered` and `mark_end` are notes and may be lost.
The store keeps what it is given; it decides nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from harness.sessions.gate import Hold
from harness.sessions.hold_times import HoldTime
from harness.sessions.lifecycle import RolloutEnd
from harness.sessions.paging import SessionOutline, SessionStub
from harness.sessions.session import Session
from harness.store.rows import TokenizerName
from harness.types import Turn


@dataclass(frozen=True, slots=True)
class DamagedSession:
    """A session that is in the store and cannot be read back."""

    session_id: str
    api_key: str
    reason: str


Take = Callable[[Session], Session | SessionStub]
"""What becomes of a session that was read back."""


def as_read(session: Session) -> Session:
    """The session itself."""
    return session


class LoadedSessions(NamedTuple):
    """The sessions that an earlier server left unclosed."""

    sessions: Sequence[Session | SessionStub] = ()
    damaged: Sequence[DamagedSession] = ()


class SessionStore(Protocol):
    """Where sessions are kept. An async context manager; all methods raise `StoreError`."""

    tokenizer: TokenizerName
    """Kept with each session that is created; the server sets it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def reads_back(self) -> bool:
        """Whether `outline` and `read` find what was kept: only then may a session be paged out."""
        ...

    @property
    def problem(self) -> str | None:
        """Why nothing can be kept any more, until the server is started again; None while all is well."""

    async def create(self, session: Session) -> None:
        """Keep a session that has no turns yet."""

    async def take_over(self, session: Session, previous: Session) -> None:
        """Keep a session to which turns of `previous` move, and `previous` as closed: both or neither.

        Raises `StoreError` when the store does not have all of those turns.
        """

    async def commit(self, session_id: str, turn: Turn) -> None:
        """Keep the outcome of a turn, in the place of an earlier one of the same turn."""

    async def keep_scores(self, session_id: str, turns: Sequence[Turn]) -> None:
        """Keep the proximal columns of turns that are kept already, in one write, under way before this first waits.

        Nothing else of them is touched. A turn that has another outcome by then keeps the columns of that one.
        """

    async def set_phase(self, session: Session | SessionStub) -> None:
        """Keep the phase of a session, and why it is closed."""

    async def forget_closed(self, older_than_s: float, most: int) -> int:
        """Delete what is kept of at most `most` sessions that were closed so long ago; returns of how many."""

    def mark_delivered(self, session_id: str, index: int, *, delivered: bool = True) -> None:
        """Note whether a turn's answer was handed over; does not wait for the disk."""

    def mark_end(self, session_id: str, end: RolloutEnd) -> None:
        """Note how a rollout ended, before its session is closed; does not wait for the disk."""

    async def load(self, take: Take = as_read) -> LoadedSessions:
        """What `take` makes of each session that is not closed, as it was kept with its turns; damaged ones by name.

        `take` is called in another thread, and one session is read at one time.
        """

    async def outline(self, session_id: str) -> SessionOutline | None:
        """What is kept of a session, in short; None when that is nothing."""

    async def read(self, session_id: str) -> Session:
        """One session with its turns, as it was kept. Raises `StoreError` when it is not there, or damaged."""
        ...

    async def keep_hold(self, hold: Hold) -> None:
        """Keep a hold on the gate, in the place of an earlier one of its holder."""

    async def drop_hold(self, holder: str) -> None:
        """Forget the hold of `holder`, if there is one."""

    async def keep_label(self, label: str, number: int) -> None:
        """Keep which policy version a label of weights stands for."""

    async def load_labels(self) -> dict[str, int]:
        """The labels that were kept."""

    async def load_holds(self) -> list[Hold]:
        """The holds that were kept, those whose time is over included."""

    async def load_hold_times(self, most: int) -> list[HoldTime]:
        """When the last `most` holds were on the gate, in the order in which they began."""
