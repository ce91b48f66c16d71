"""The contract between the server and the store that makes sessions durable.

Promise (I9): when `create`, `take_over`, `commit`, `keep_scores`, `keep_teaching`, `set_phase`, `keep_hold`,
`drop_hold` or `keep_label` returns, its write survives `kill -9` of this process. Notes (`mark_delivered`, `mark_end`)
may be lost. A store makes no decisions. `MemoryStore` promises nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from harness.errors import StoreError
from harness.server.store.rows import TokenizerName
from harness.sessions.gate import Hold
from harness.sessions.hold_times import HoldTime
from harness.sessions.lifecycle import RolloutEnd
from harness.sessions.paging import SessionOutline, SessionStub
from harness.sessions.session import Session
from harness.token_rows import RecordedRows
from harness.types import Turn


@dataclass(frozen=True, slots=True)
class DamagedSession:
    """Stored session that cannot be loaded."""

    session_id: str
    api_key: str
    reason: str


Take = Callable[[Session], Session | SessionStub]
"""Maps each loaded session, for instance to its stub."""


def as_read(session: Session) -> Session:
    """Return the session unchanged."""
    return session


class LoadedSessions(NamedTuple):
    """Sessions that an earlier server left unclosed."""

    sessions: Sequence[Session | SessionStub] = ()
    damaged: Sequence[DamagedSession] = ()


class StoredRecord(NamedTuple):
    """A session and the tokenizer of its tokens."""

    session: Session
    tokenizer: TokenizerName


class SessionStore(Protocol):
    """Async context manager; all methods raise `StoreError`."""

    tokenizer: TokenizerName
    """Recorded with each new session; set by the server."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def reads_back(self) -> bool:
        """True if stored sessions can be read back. Only then may the server evict sessions."""
        ...

    @property
    def problem(self) -> str | None:
        """Reason that writes fail until a restart, or None."""

    async def create(self, session: Session) -> None:
        """Store a session with the turns that it inherits, in one transaction."""

    async def take_over(self, session: Session, previous: Session) -> None:
        """Move turns of `previous` to a new session, and close it, in one transaction. Raises `StoreError`."""

    async def commit(self, session_id: str, turn: Turn) -> None:
        """Store the outcome of a turn and its rows, replacing an earlier one."""

    async def keep_scores(self, session_id: str, turns: Sequence[Turn]) -> None:
        """Update the proximal columns of turns in one write, queued before the first `await`.

        A turn whose outcome was replaced meanwhile keeps the columns of the new outcome.
        """

    async def keep_teaching(self, session_id: str, name: str, turns: Sequence[Turn]) -> None:
        """Store the scores of turns by teacher `name`; a turn whose outcome was replaced meanwhile gets none."""

    async def set_phase(self, session: Session | SessionStub) -> None:
        """Store the phase and the close reason of a session."""

    async def forget_closed(self, older_than_s: float, most: int) -> int:
        """Delete at most `most` sessions closed `older_than_s` ago. Return their number."""

    def mark_delivered(self, session_id: str, index: int, *, delivered: bool = True) -> None:
        """Note whether the client received a turn's answer."""

    def mark_end(self, session_id: str, end: RolloutEnd) -> None:
        """Note the end of a rollout before its session closes."""

    async def load(self, take: Take = as_read) -> LoadedSessions:
        """Load unclosed sessions, each mapped by `take` in another thread, and name the damaged ones."""

    async def outline(self, session_id: str) -> SessionOutline | None:
        """Return a summary of a session, or None if it is not stored."""

    async def read(self, session_id: str) -> Session:
        """Load one session. Raises `StoreError` if it is missing or damaged."""
        ...

    async def read_record(self, session_id: str) -> StoredRecord:
        """Load one session, closed or not. Raises `StoreError` as `read`."""
        ...

    async def find_heir(self, session_id: str) -> str | None:
        """Return a stored session that trains the record of `session_id`, if any."""

    async def load_rows(self, session_id: str) -> Mapping[int, RecordedRows]:
        """Return the routed experts of a session's turns, by turn. Raises `StoreError` if they are damaged."""
        ...

    async def keep_hold(self, hold: Hold) -> None:
        """Store a hold, replacing an earlier one of its holder."""

    async def drop_hold(self, holder: str) -> None:
        """Delete the hold of `holder`, if any."""

    async def keep_label(self, label: str, number: int) -> None:
        """Store the policy version of a weight label."""

    async def load_labels(self) -> dict[str, int]:
        """Return labels and their versions."""

    async def load_holds(self) -> list[Hold]:
        """Return holds, expired ones included."""

    async def load_hold_times(self, most: int) -> list[HoldTime]:
        """Return the times of the last `most` holds, in order of their start."""


class MemoryStore:
    """A `SessionStore` whose promise ends with the process. For tests and throw-away servers."""

    tokenizer = TokenizerName()
    reads_back = False
    problem = None

    async def __aenter__(self) -> Self:
        return self

    async def _keep(self, *_: object, **__: object) -> None:
        """Do nothing: the server has the sessions, their heirs, the holds and the labels."""

    create = take_over = commit = keep_scores = keep_teaching = set_phase = outline = find_heir = _keep
    keep_hold = drop_hold = keep_label = __aexit__ = _keep

    def mark_delivered(self, *_: object, **__: object) -> None:
        """Do nothing."""

    mark_end = mark_delivered

    async def forget_closed(self, older_than_s: float, most: int) -> int:
        return 0

    async def load(self, take: Take = as_read) -> LoadedSessions:
        return LoadedSessions()

    async def read(self, session_id: str) -> Session:
        raise StoreError(f"session {session_id} is not kept: this store does not keep sessions")

    async def read_record(self, session_id: str) -> StoredRecord:
        return StoredRecord(await self.read(session_id), self.tokenizer)

    async def load_rows(self, session_id: str) -> dict[int, RecordedRows]:
        return {}

    async def load_labels(self) -> dict[str, int]:
        return {}

    async def load_holds(self) -> list[Hold]:
        return []

    async def load_hold_times(self, most: int) -> list[HoldTime]:
        return []
