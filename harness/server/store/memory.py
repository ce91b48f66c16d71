"""A store without persistence: sessions end with their server. For tests and throw-away servers."""

from collections.abc import Sequence
from typing import Self

from harness.errors import StoreError
from harness.server.store.base import LoadedSessions, StoredRecord, Take, as_read
from harness.server.store.rows import TokenizerName
from harness.sessions.gate import Hold
from harness.sessions.hold_times import HoldTime
from harness.sessions.lifecycle import RolloutEnd
from harness.sessions.paging import SessionOutline, SessionStub
from harness.sessions.session import Session
from harness.token_rows import RecordedRows
from harness.types import Turn


class MemoryStore:
    """A `SessionStore` whose promise ends with the process."""

    tokenizer = TokenizerName()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    @property
    def reads_back(self) -> bool:
        """False: nothing is stored."""
        return False

    @property
    def problem(self) -> str | None:
        """None: writes cannot fail."""
        return None

    async def create(self, session: Session) -> None:
        """Do nothing: the server holds the session."""

    async def take_over(self, session: Session, previous: Session) -> None:
        """Do nothing: the server holds both sessions."""

    async def commit(self, session_id: str, turn: Turn) -> None:
        """Do nothing."""

    async def keep_scores(self, session_id: str, turns: Sequence[Turn]) -> None:
        """Do nothing."""

    async def keep_teaching(self, session_id: str, name: str, turns: Sequence[Turn]) -> None:
        """Do nothing: the server has the scores."""

    async def set_phase(self, session: Session | SessionStub) -> None:
        """Do nothing."""

    async def forget_closed(self, older_than_s: float, most: int) -> int:
        return 0

    def mark_delivered(self, session_id: str, index: int, *, delivered: bool = True) -> None:
        """Do nothing."""

    def mark_end(self, session_id: str, end: RolloutEnd) -> None:
        """Do nothing."""

    async def load(self, take: Take = as_read) -> LoadedSessions:
        return LoadedSessions()

    async def outline(self, session_id: str) -> SessionOutline | None:
        return None

    async def read(self, session_id: str) -> Session:
        raise StoreError(f"session {session_id} is not kept: this store does not keep sessions")

    async def read_record(self, session_id: str) -> StoredRecord:
        raise StoreError(f"session {session_id} is not kept: this store does not keep sessions")

    async def find_heir(self, session_id: str) -> str | None:
        """Return None: the server has the heirs."""
        return None

    async def load_rows(self, session_id: str) -> dict[int, RecordedRows]:
        """Return no rows: the server has them."""
        return {}

    async def keep_hold(self, hold: Hold) -> None:
        """Do nothing: the server has the hold."""

    async def drop_hold(self, holder: str) -> None:
        """Do nothing."""

    async def keep_label(self, label: str, number: int) -> None:
        """Do nothing: the server has the label."""

    async def load_labels(self) -> dict[str, int]:
        return {}

    async def load_holds(self) -> list[Hold]:
        return []

    async def load_hold_times(self, most: int) -> list[HoldTime]:
        """Return no times: the server has them."""
        return []
