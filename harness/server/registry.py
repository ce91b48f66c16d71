"""The sessions a server holds in memory, by id and by key."""

import secrets
import time
from collections.abc import Iterable, Iterator

from harness.errors import SessionNotFound
from harness.sessions.session import Session, SessionConfig

API_KEY_PREFIX = "sk-harness-"
"""Of the key of every session."""


class SessionRegistry:
    """Live sessions; closed ones are forgotten here and kept by the store."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def create(self, config: SessionConfig) -> Session:
        """A new session with an id (32 hex digits) and a key of its own, not yet added."""
        return Session(secrets.token_hex(16), API_KEY_PREFIX + secrets.token_hex(16), config, time.time())

    def add(self, sessions: Iterable[Session]) -> None:
        """Hold `sessions`."""
        for session in sessions:
            self._by_id[session.session_id] = session
            self._by_key[session.api_key] = session

    def find(self, session_id: str) -> Session | None:
        """The session with that id, None when it is not held."""
        return self._by_id.get(session_id)

    def get(self, session_id: str) -> Session:
        """The session with that id. Raises `SessionNotFound`."""
        session = self._by_id.get(session_id)
        if session is None:
            raise SessionNotFound(f"no session {session_id[:64]!r}: never created, or deleted")
        return session

    def by_key(self, api_key: str) -> Session:
        """The session with that key. Raises `SessionNotFound`."""
        session = self._by_key.get(api_key)
        if session is None:
            raise SessionNotFound("no session has this API key; use the base_url or the api_key of POST /sessions")
        return session

    def remove(self, session: Session) -> None:
        """Forget `session`."""
        self._by_id.pop(session.session_id, None)
        self._by_key.pop(session.api_key, None)
