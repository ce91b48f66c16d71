"""Views of a running server's sessions, which may change or end meanwhile."""

from collections.abc import Callable
from pathlib import Path

from harness.errors import RunError, SessionServerError
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import GREETING_S, ServerDescription, SessionServerClient, ask_server
from harness.server.store.rows import TokenizerName
from harness.viewer.damaged_run import say_missing
from harness.viewer.live.live_reading import live_line
from harness.viewer.look import find_tokenizer
from harness.viewer.run_view import Band, RunView, hold_band
from harness.viewer.session_view import SessionView


def look_at_server(address: SessionServerAddress, tokenizer: Path | None = None) -> RunView:
    """Return the server's sessions and hold times. Raises `SessionServerError`, `TokenizerError`."""

    async def look(server: SessionServerClient) -> RunView:
        lines = [live_line(each) for each in await server.sessions()]
        missing, bands = list[str](), list[Band]()
        folder = find_tokenizer(tokenizer_of(await server.describe(deadline_s=GREETING_S)), tokenizer, missing)
        with say_missing("its pauses", missing):
            bands += map(hold_band, (await server.hold_times(deadline_s=server.deadlines.read_s)).holds)
        return RunView(address.url, lines, tokenizer=folder, bands=bands, missing=missing)

    return ask_server(address, look)


def tokenizer_of(described: ServerDescription) -> TokenizerName:
    """Return the tokenizer of a server. Earlier versions name no folder."""
    return TokenizerName(described.tokenizer or None, described.serves.get("tokenizer_digest"))


def look_into_all(address: SessionServerAddress) -> Callable[[str], SessionView]:
    """Return a reader of sessions that raises `SessionServerError`, and `RunError` for a session that is gone.

    It does not wait again for a server that is gone.
    """
    gone: list[SessionServerError] = []

    def look(session_id: str) -> SessionView:
        if gone:
            raise gone[0]
        try:
            record = ask_server(address, lambda server: server.record(session_id))
        except SessionServerError as error:
            if not error.status:
                gone.append(error)
            raise
        if record.get("phase") == "unknown":
            raise RunError(f"{address.url} no longer has session {session_id}")
        return SessionView.of(record)

    return look
