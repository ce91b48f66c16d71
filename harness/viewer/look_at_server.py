"""Looking at a server that runs: the sessions that it holds, and one of them as its record, tokens included.

A session goes on while it is looked at, and may be gone before. A server of an earlier version does not say what had
held its gate: that is missing then.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from harness.client.connections import SessionServerAddress
from harness.client.session_server import ServerDescription, SessionServerClient
from harness.errors import RunError, SessionServerError
from harness.store.rows import TokenizerName
from harness.viewer.damage import say_missing
from harness.viewer.look import find_tokenizer
from harness.viewer.run_view import Band, RunView, SessionLine, hold_band
from harness.viewer.session_view import SessionView

_GREETING_S = 5.0
"""For an answer at all: what is asked afterwards may take its time, and is asked again when nobody answers."""
_HOLDS_S = 30.0

_T = TypeVar("_T")


def look_at_server(address: SessionServerAddress, tokenizer: Path | None = None) -> RunView:
    """The sessions of the server, and what had held its gate. Raises `SessionServerError`, `TokenizerError`."""

    async def look(server: SessionServerClient) -> RunView:
        lines = [SessionLine(each.session_id, turns=each.turns) for each in await server.sessions()]
        missing, bands = list[str](), list[Band]()
        folder = find_tokenizer(tokenizer_of(await server.describe(deadline_s=_GREETING_S)), tokenizer, missing)
        with say_missing("its pauses", missing):
            bands += map(hold_band, (await server.hold_times(deadline_s=_HOLDS_S)).holds)
        return RunView(address.url, lines, tokenizer=folder, bands=bands, missing=missing)

    return _ask(address, look)


def tokenizer_of(described: ServerDescription) -> TokenizerName:
    """The tokenizer of a server; a server of an earlier version names no folder."""
    return TokenizerName(described.tokenizer or None, described.serves.get("tokenizer_digest"))


def look_into_server(address: SessionServerAddress, session_id: str) -> SessionView:
    """A session of the server. Raises `SessionServerError`, `RunError` when it is not there."""
    record = _ask(address, lambda server: server.record(session_id))
    if record.get("phase") == "unknown":
        raise RunError(f"{address.url} does not have session {session_id} any more")
    return SessionView.of(record)


def look_into_all(address: SessionServerAddress) -> Callable[[str], SessionView]:
    """`look_into_server` for one session after the other; a server that has gone is not waited for each time."""
    gone: list[SessionServerError] = []

    def look(session_id: str) -> SessionView:
        if gone:
            raise gone[0]
        try:
            return look_into_server(address, session_id)
        except SessionServerError as error:
            if not error.status:
                gone.append(error)
            raise

    return look


def _ask(address: SessionServerAddress, question: Callable[[SessionServerClient], Awaitable[_T]]) -> _T:
    async def ask() -> _T:
        async with SessionServerClient(address) as server:
            await server.describe(deadline_s=_GREETING_S)
            return await question(server)

    return asyncio.run(ask())
