"""A store that keeps nothing: sessions live as long as their server. For tests and throw-away servers."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from harness.errors import StoreError
from harness.sessions.gate import Hold
from harness.sessions.hold_times import HoldTime
from harness.sessions.lifecycle import RolloutEnd
from harness.sessions.paging import SessionOutline, SessionStub
from harness.sessions.session import Session
from harness.store.base import LoadedSessions, Take, as_read
from harness.store.rows import TokenizerName
from harness.types import Turn


class MemoryStore:
    """A `SessionStore` whose promise does not outlive the process."""

    tokenizer = TokenizerName()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @property
    def reads_back(self) -> bool:
        """Nothing is kept."""
        return False

    @property
    def problem(self) -> str | None:
        """Nothing can go wrong."""
        return None

    async def create(self, session: Session) -> None:
        """Nothing to do: the server holds the session."""

    async def take_over(self, session: Session, previous: Session) -> None:
        """Nothing to do: the server holds the one and not the other."""

    async def commit(self, session_id: str, turn: Turn) -> None:
        """Nothing to do."""

    async def keep_scores(self, session_id: str, turns: Sequence[Turn]) -> None:
        """Nothing to do."""

    async def set_phase(self, session: Session | SessionStub) -> None:
        """Nothing to do."""

    async def forget_closed(self, older_than_s: float, most: int) -> int:
        """Nothing is kept."""
        del older_than_s, most
        return 0

    def mark_delivered(self, session_id: str, index: int, *, delivered: bool = True) -> None:
        """Nothing to do."""

    def mark_end(self, session_id: str, end: RolloutEnd) -> None:
        """Nothing to do."""

    async def load(self, take: Take = as_read) -> LoadedSessions:
        """No sessions."""
        del take
        return LoadedSessions()

    async def outline(self, session_id: str) -> SessionOutline | None:
        """None is kept."""
        del session_id
        return None

    async def read(self, session_id: str) -> Session:
        """Raises `StoreError`."""
        raise StoreError(f"session {session_id} is not kept: this store keeps nothing")

    async def keep_hold(self, hold: Hold) -> None:
        """Nothing to do: the server has the hold."""

    async def drop_hold(self, holder: str) -> None:
        """Nothing to do."""

    async def keep_label(self, label: str, number: int) -> None:
        """Nothing to do: the server has the label."""

    async def load_labels(self) -> dict[str, int]:
        """No labels."""
        return {}

    async def load_holds(self) -> list[Hold]:
        """No holds."""
        return []

    async def load_hold_times(self, most: int) -> list[HoldTime]:
        """None: the server has them."""
        del most
        return []
